// Choosing a user: known users, a new user, or any id; and the user's history with titles and times.

import { get } from "./api.js"
import { byId, make, setText } from "./dom.js"
import { ago, plural } from "./text.js"

export function startUsers(session) {
  byId("new-user").addEventListener("click", () => session.chooseNew())
  byId("user-form").addEventListener("submit", (event) => {
    event.preventDefault()
    const userId = byId("user-id").value.trim()
    if (userId) session.choose(userId)
  })
  session.addEventListener("user", ({ detail }) => markChosen(detail.userId))
  session.addEventListener("history", ({ detail }) => showHistory(detail, session.userId))
}

export async function loadUsers(session) {
  try {
    const { users } = await get("/console/users")
    byId("users").replaceChildren(...users.map((user) => chip(user, session)))
    markChosen(session.userId)
    return users
  } catch (error) {
    if (error.status === 403) byId("users").replaceChildren(make("p", { class: "note" }, "This key may not list users. Choose a new user, or enter an id."))
    return []
  }
}

function chip(user, session) {
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
    make("small", {}, plural(user.num_events, "event")),
  )
}

function markChosen(userId) {
  for (const button of byId("users").querySelectorAll("button")) button.setAttribute("aria-pressed", String(button.dataset.user === userId))
}

let shownFor = null
let shownCount = 0

function showHistory({ history, error }, userId) {
  setText(byId("history-title"), userId === null ? "History" : `History of ${userId}`)
  if (error) {
    byId("history").replaceChildren()
    shownFor = null
    setText(byId("history-note"), failure(error))
    return
  }
  const added = shownFor === history.user_id ? Math.max(0, history.num_events - shownCount) : 0
  rememberTime(history)
  shownFor = history.user_id
  shownCount = history.num_events
  setText(byId("history-note"), summary(history))
  byId("history").replaceChildren(...history.items.map((item, place) => row(item, timeOf(history, place), place < added)))
}

// The store holds the time of the newest event only; the page remembers those it has read.
const eventTimes = new Map()
const key = (userId, event) => `${event} ${userId}`

function rememberTime({ user_id, num_events, newest_event_time_ms }) {
  if (newest_event_time_ms !== null) eventTimes.set(key(user_id, num_events), newest_event_time_ms)
}

const timeOf = ({ user_id, num_events, items }, place) => items[place].event_time_ms ?? eventTimes.get(key(user_id, num_events - place)) ?? null

function failure(error) {
  if (error.status === 503) return "The feature store is unavailable, so the history cannot be read. Recommendations are still answered."
  if (error.status === 403) return "This key may not read histories."
  return "The history could not be read."
}

function summary(history) {
  if (history.num_events === 0) return "No events yet. Click an item to send one."
  const newest = history.newest_event_time_ms === null ? "" : `, the newest ${ago(history.newest_event_time_ms)}`
  const shown = history.items.length < history.num_events ? `; the last ${history.items.length} are shown` : ""
  return `${plural(history.num_events, "event")}${newest}${shown}`
}

function row(item, timeMs, isNew) {
  const when = timeMs === null ? "" : ago(timeMs)
  return make(
    "li",
    { class: isNew ? "fresh" : "" },
    make("span", { class: "title" }, item.title),
    make("small", {}, [when, item.categories.slice(0, 2).join(", ")].filter(Boolean).join(" · ")),
  )
}
