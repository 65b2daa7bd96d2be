// Who is asking: known users to choose from, a visitor to invent, and the history with titles and times.

import { get } from "./api.js"
import { byId, make, setText } from "./dom.js"
import { ago, plural } from "./words.js"

export function startPeople(session) {
  byId("invent").addEventListener("click", () => session.invent())
  byId("user-form").addEventListener("submit", (event) => {
    event.preventDefault()
    const userId = byId("user-id").value.trim()
    if (userId) session.choose(userId)
  })
  session.addEventListener("user", ({ detail }) => mark(detail.userId))
  session.addEventListener("history", ({ detail }) => showHistory(detail, session.userId))
}

export async function loadPeople(session) {
  try {
    const { users } = await get("/console/users")
    byId("people").replaceChildren(...users.map((user) => chip(user, session)))
    mark(session.userId)
    return users
  } catch (error) {
    if (error.status === 403) byId("people").replaceChildren(make("p", { class: "note" }, "This key may not list users. Invent a visitor, or name one."))
    return []
  }
}

function chip(user, session) {
  const events = plural(user.num_events, "event")
  return make(
    "button",
    {
      type: "button",
      class: "chip",
      data: { user: user.user_id },
      "aria-pressed": "false",
      title: user.has_stored_list ? "has a stored list" : "",
      onclick: () => session.choose(user.user_id),
    },
    make("strong", {}, user.user_id),
    make("small", {}, events),
  )
}

function mark(userId) {
  for (const button of byId("people").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.user === userId))
}

let shownFor = null
let shownCount = 0

function showHistory({ history, error }, userId) {
  setText(byId("history-title"), userId === null ? "History" : `History of ${userId}`)
  if (error) {
    byId("history").replaceChildren()
    shownFor = null
    setText(byId("history-note"), whyNot(error))
    return
  }
  const isSame = shownFor === history.user_id
  const added = isSame ? Math.max(0, history.num_events - shownCount) : 0
  remember(history)
  shownFor = history.user_id
  shownCount = history.num_events
  setText(byId("history-note"), summary(history))
  byId("history").replaceChildren(...history.items.map((deed, place) => row(deed, timeOf(history, place), place < added)))
}

// The store tells the newest event's time only; what was seen here is remembered.
const timesSeen = new Map()
const key = (userId, event) => `${event} ${userId}`

function remember({ user_id, num_events, newest_event_time_ms }) {
  if (newest_event_time_ms !== null) timesSeen.set(key(user_id, num_events), newest_event_time_ms)
}

const timeOf = ({ user_id, num_events, items }, place) => items[place].event_time_ms ?? timesSeen.get(key(user_id, num_events - place)) ?? null

function whyNot(error) {
  if (error.status === 503) return "The feature store is away, so the history cannot be read. There is an answer all the same."
  if (error.status === 403) return "This key may not read histories."
  return "The history could not be read."
}

function summary(history) {
  if (history.num_events === 0) return "Nothing yet. Click a title and watch a history begin."
  const newest = history.newest_event_time_ms === null ? "" : `, the newest ${ago(history.newest_event_time_ms)}`
  const shown = history.items.length < history.num_events ? `; the last ${history.items.length} are here` : ""
  return `${plural(history.num_events, "event")}${newest}${shown}`
}

function row(deed, timeMs, isNew) {
  const when = timeMs === null ? "" : ago(timeMs)
  return make(
    "li",
    { class: isNew ? "fresh" : "" },
    make("span", { class: "title" }, deed.title),
    make("small", {}, [when, deed.categories.slice(0, 2).join(", ")].filter(Boolean).join(" · ")),
  )
}
