// The answer: its tier and reason, the items with score and source, the moves since the last answer, and the time of each stage.

import { announce, byId, make, prefersReducedMotion, setText } from "./dom.js"
import { elapsedMs } from "./session.js"
import { ago, milliseconds, plural, reasonText, score, tierTitle, understoodText } from "./text.js"

const MOVE_MS = 210
const STAGES = ["features", "route", "rank", "answer"]
const INNER_STAGES = { rank: ["llm", "student"] }
const STAGE_TITLES = { features: "Read features", route: "Route", rank: "Rank", llm: "Language model", student: "Student", answer: "Build answer" }
const rows = new Map()
let lastPlaces = new Map()
let isFirst = true

export function startAnswer(session) {
  byId("request").addEventListener("click", () => session.request())
  byId("wish-form").addEventListener("submit", (event) => {
    event.preventDefault()
    session.query = byId("wish").value.trim()
    session.request()
  })
  session.addEventListener("user", () => {
    isFirst = true
    byId("click-note").hidden = true
  })
  session.addEventListener("answer", ({ detail }) => show(detail.answer, session))
  session.addEventListener("click-seen", ({ detail }) => showSeen(detail))
  session.addEventListener("click-unseen", ({ detail }) => showNote(`The click on ${detail.item.title} is recorded. It counts as soon as the features can be read.`, "wait"))
  session.addEventListener("failure", ({ detail }) => showNote(failure(detail), "bad"))
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
  setText(byId("understood"), session.query ? understoodText(answer.understood) : "")
  showItems(answer, session)
  byId("timeline").replaceChildren(...timeline(answer))
}

function facts(answer) {
  const newest = answer.newest_event_time_ms === null ? "no event of this user seen" : `newest event seen: ${ago(answer.newest_event_time_ms)}`
  return `${milliseconds(elapsedMs(answer))} of ${answer.deadline_ms} ms · ${newest}`
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
    const before = isFresh ? place : lastPlaces.get(item.item_id)
    if (before !== place) changes += 1
    fill(row, item, place, before, high > low ? (item.score - low) / (high - low) : 1, before !== place)
    rows.set(item.item_id, row)
    if (list.children[place] !== row) list.insertBefore(row, list.children[place] ?? null)
  })
  lastPlaces = places
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

// Animates rows from their old positions to the new ones.
function animate(tops) {
  if (prefersReducedMotion()) return
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

function showSeen({ item, afterMs }) {
  showNote(`${item.title}: seen after ${Math.round(afterMs)} ms`, "good")
  announce(`The click on ${item.title} was seen after ${Math.round(afterMs)} milliseconds. ${byId("tier").textContent} answers with ${plural(rows.size, "item")}.`)
}

function showNote(text, kind) {
  const note = byId("click-note")
  note.hidden = false
  note.dataset.kind = kind
  setText(note, text)
  if (!prefersReducedMotion()) note.animate([{ opacity: 0.2 }, { opacity: 1 }], { duration: 180 })
  if (kind !== "good") announce(text)
}

function failure({ error, action, item }) {
  if (item) rows.get(item.item_id)?.classList.remove("pending")
  const what = action === "click" ? "The click was not recorded" : "The request failed"
  return `${what}: ${error.status === 401 ? "a key is needed" : error.message}.`
}

// The deadline as one bar, and below it the stages, enlarged.
function timeline(answer) {
  const elapsed = elapsedMs(answer)
  return [budget(elapsed, answer.deadline_ms), lanes(spans(answer.stages_ms), elapsed)]
}

function budget(elapsed, deadline) {
  const used = make("span", { class: "used" })
  used.style.width = `${Math.min(100, Math.max(0.8, (100 * elapsed) / deadline))}%`
  const isLate = elapsed > deadline
  return make(
    "div",
    { class: `budget${isLate ? " late" : ""}` },
    make("span", { class: "whole", "aria-hidden": "true" }, used),
    make("span", { class: "words" }, make("b", {}, `${milliseconds(elapsed)} used`), ` · ${isLate ? "late" : `${milliseconds(deadline - elapsed)} left`} of ${deadline} ms`),
  )
}

// Stages run one after the other; the language model and the student run in parallel inside ranking.
function spans(stages) {
  const found = []
  let at = 0
  for (const name of STAGES) {
    if (!(name in stages)) continue
    const inner = (INNER_STAGES[name] ?? []).filter((other) => other in stages)
    found.push(...(inner.length ? inner : [name]).map((part) => ({ name: part, from: at, ms: stages[part] })))
    at += stages[name]
  }
  return found
}

function lanes(parts, elapsed) {
  return make("ol", { class: "lanes" }, ...parts.map((part) => lane(part, elapsed)))
}

function lane({ name, from, ms }, elapsed) {
  const bar = make("span", { class: "stage", data: { stage: name } })
  const share = (value) => (100 * value) / Math.max(elapsed, 0.001)
  bar.style.marginLeft = `${Math.min(99, share(from))}%`
  bar.style.width = `${Math.max(0.8, Math.min(share(ms), 100 - share(from)))}%`
  return make("li", {}, make("span", { class: "name" }, STAGE_TITLES[name] ?? name), make("span", { class: "track", "aria-hidden": "true" }, bar), make("span", { class: "ms" }, milliseconds(ms)))
}
