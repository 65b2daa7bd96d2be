// Calls to the service: JSON, the API key if one is set, and errors with their status.

const KEY = "tailrace-key"

class ApiError extends Error {
  constructor(status, error) {
    super(error.message)
    this.status = status
    this.field = error.field
    this.fix = error.fix
  }
}

export const keyNeeded = new EventTarget()

export const hasKey = () => sessionStorage.getItem(KEY) !== null
export const storeKey = (key) => sessionStorage.setItem(KEY, key)
export const dropKey = () => sessionStorage.removeItem(KEY)

async function call(path, options) {
  const key = sessionStorage.getItem(KEY)
  const headers = { ...options.headers, ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) }
  const response = await fetch(path, { ...options, headers, cache: "no-store" })
  const body = await response.json()
  if (response.ok) return body
  if (response.status === 401) keyNeeded.dispatchEvent(new Event("needed"))
  throw new ApiError(response.status, body.error)
}

export const get = (path, options = {}) => call(path, { method: "GET", ...options })
export const post = (path, body, options = {}) => call(path, { method: "POST", body: JSON.stringify(body), ...options })

const withBody = (method) => (path, body) => call(path, { method, body: JSON.stringify(body) })
export const patch = withBody("PATCH")
export const put = withBody("PUT")

// A path parameter. Browsers resolve `.` and `..` in a path even when encoded.
export function segment(id) {
  if (id !== "." && id !== "..") return encodeURIComponent(id)
  throw new ApiError(0, { field: "item_id", message: `"${id}" fits in no path`, fix: "change it by PUT /v1/items" })
}

export const find = (text) => get(`/console/items?find=${encodeURIComponent(text)}`)
export const recommend = (body, options) => post("/v1/recommendations", body, options)
export const search = ({ deadline_ms, ...query }, options) =>
  get(`/v1/search?${new URLSearchParams(query)}`, { headers: { "x-deadline-ms": String(deadline_ms) }, ...options })
export const recordEvent = (event) => post("/v1/events", event, { priority: "high" })
