// Talking to the service: JSON, the key if one is needed, and errors that say what they are.

const KEY = "tailrace-key"

class Refused extends Error {
  constructor(status, error) {
    super(error.message)
    this.status = status
  }
}

export const keyNeeded = new EventTarget()

export const hasKey = () => sessionStorage.getItem(KEY) !== null
export const keepKey = (key) => sessionStorage.setItem(KEY, key)
export const dropKey = () => sessionStorage.removeItem(KEY)

async function call(path, options) {
  const key = sessionStorage.getItem(KEY)
  const headers = { ...(options.body ? { "content-type": "application/json" } : {}), ...(key ? { authorization: `Bearer ${key}` } : {}) }
  const answer = await fetch(path, { ...options, headers, cache: "no-store" })
  const body = await answer.json()
  if (answer.ok) return body
  if (answer.status === 401) keyNeeded.dispatchEvent(new Event("needed"))
  throw new Refused(answer.status, body.error)
}

export const get = (path, options = {}) => call(path, { method: "GET", ...options })
export const post = (path, body, options = {}) => call(path, { method: "POST", body: JSON.stringify(body), ...options })

export const recommend = (body, options) => post("/v1/recommendations", body, options)
export const record = (event) => post("/v1/events", event, { priority: "high" })
