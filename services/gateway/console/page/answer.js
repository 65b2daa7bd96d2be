// The list: who made it and why, each item with its score and source, and what moved since the last one.

import { announce, byId, make, prefersStill, setText } from "./dom.js"
import { takenMs } from "./session.js"
import { tierTitle, ago, milliseconds, plural, reasonText, score } from "./words.js"

const MOVE_MS = 210
const rows = new Map()
let placeBefore = new Map()
let isFirst = true

export function startAnswer(session) {
  byId("ask").addEventListener("click", () => session.ask())
  session.addEventListener("user", () => {
    isFirst = true
    byId("seen").hidden = true
  })
  session.addEventListener("answer", ({ detail }) => show(detail.answer, session))
  session.addEventListener("seen", ({ detail }) => sawIt(detail))
  session.addEventListener("unseen", ({ detail }) => say(`The click on ${detail.item.title} is safe in the log. It shows as soon as the features can be read.`, "wait"))
  session.addEventListener("trouble", ({ detail }) => say(trouble(detail), "bad"))
}

export function clickPlace(session, place) {
  const item = session.answer?.items[place]
  if (item) choose(item, session)
}

function show(answer, session) {
  const tier = byId("tier")
  tier.dataset.tier = answer.tier
  setText(tier, tierTitle(answer.tier))
  byId("verdict").dataset.tier = answer.tier
  setText(byId("reason"), reasonText(answer.reason))
  setText(byId("facts"), facts(answer))
  showItems(answer, session)
}

function facts(answer) {
  const newest = answer.newest_event_time_ms === null ? "has seen no event of this visitor" : `has seen everything up to ${ago(answer.newest_event_time_ms)}`
  return `${milliseconds(takenMs(answer))} of ${answer.deadline_ms} ms · ${newest}`
}

function showItems(answer, session) {
  const list = byId("items")
  list.dataset.user = session.userId
  const tops = new Map([...rows].map(([id, row]) => [id, row.getBoundingClientRect().top]))
  const focused = document.activeElement?.closest?.("#items li")?.dataset.item
  const scores = answer.items.map((item) => item.score)
  const [low, high] = [Math.min(...scores), Math.max(...scores)]
  const isFresh = isFirst
  isFirst = false
  const places = new Map(answer.items.map((item, place) => [item.item_id, place]))
  for (const [id, row] of rows) if (!places.has(id)) rows.delete(id) && row.remove()

  let changes = 0
  answer.items.forEach((item, place) => {
    const row = rows.get(item.item_id) ?? newRow(item, session)
    const before = isFresh ? place : placeBefore.get(item.item_id)
    if (before !== place) changes += 1
    fill(row, item, place, before, high > low ? (item.score - low) / (high - low) : 1, before !== place)
    rows.set(item.item_id, row)
    if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null)
  })
  placeBefore = places
  if (!isFresh && changes) animate(tops)
  if (focused && !rows.has(focused)) list.querySelector("button")?.focus({ preventScroll: true })
  else if (focused) rows.get(focused).querySelector("button").focus({ preventScroll: true })
}

function newRow(item, session) {
  const row = make(
    "li",
    { data: { item: item.item_id } },
    make(
      "button",
      { type: "button", onclick: () => choose(row.shown, session) },
      make("span", { class: "place" }),
      make("span", { class: "title" }, `${item.title} `, make("span", { class: "moved" })),
      make("span", { class: "bar", "aria-hidden": "true" }, make("span")),
      make("span", { class: "score" }),
      make("span", { class: "source" }),
    ),
  )
  return row
}

function fill(row, item, place, before, share, hasChanged) {
  row.shown = item
  const part = (name) => row.querySelector(`.${name}`)
  setText(part("place"), String(place + 1))
  setText(part("score"), score(item.score))
  part("source").dataset.tier = item.source
  setText(part("source"), tierTitle(item.source))
  part("bar").dataset.tier = item.source
  part("bar").firstChild.style.width = `${6 + 94 * share}%`
  row.classList.remove("pending")
  if (hasChanged) markMove(row, part("moved"), before, place)
}

function markMove(row, mark, before, place) {
  const isNew = before === undefined
  const steps = isNew ? 0 : before - place
  mark.dataset.kind = isNew ? "new" : steps > 0 ? "up" : "down"
  setText(mark, isNew ? "new" : `${steps > 0 ? "▲" : "▼"} ${Math.abs(steps)}`)
  row.classList.toggle("fresh", isNew)
  clearTimeout(row.fading)
  row.fading = setTimeout(() => {
    setText(mark, "")
    row.classList.remove("fresh")
  }, 4_000)
}

// Rows glide from where they were to where they are.
function animate(tops) {
  if (prefersStill()) return
  for (const [id, row] of rows) {
    const top = tops.get(id)
    const shift = top === undefined ? 14 : top - row.getBoundingClientRect().top
    if (shift === 0) continue
    const from = { transform: `translateY(${shift}px)`, ...(top === undefined ? { opacity: 0 } : {}) }
    row.animate([from, { transform: "none", opacity: 1 }], { duration: MOVE_MS, easing: "cubic-bezier(.2,.7,.2,1)" })
  }
}

function choose(item, session) {
  rows.get(item.item_id)?.classList.add("pending")
  session.click(item)
}

function sawIt({ item, afterMs }) {
  say(`${item.title}: seen after ${Math.round(afterMs)} ms`, "good")
  announce(`Your click on ${item.title} was seen after ${Math.round(afterMs)} milliseconds. ${byId("tier").textContent} answers with ${plural(rows.size, "item")}.`)
}

function say(text, kind) {
  const note = byId("seen")
  note.hidden = false
  note.dataset.kind = kind
  setText(note, text)
  if (!prefersStill()) note.animate([{ opacity: 0.2 }, { opacity: 1 }], { duration: 180 })
  if (kind !== "good") announce(text)
}

function trouble({ error, doing, item }) {
  if (item) rows.get(item.item_id)?.classList.remove("pending")
  const what = doing === "click" ? "The click was not taken" : "There was no answer"
  return `${what}: ${error.status === 401 ? "a key is needed" : error.message}.`
}
