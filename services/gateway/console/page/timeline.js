// Where one request's time went: the whole deadline above, and the stages enlarged below.

import { byId, make } from "./dom.js"
import { takenMs } from "./session.js"
import { milliseconds } from "./words.js"

const NAMES = { features: "Read features", route: "Decide", rank: "Rank", llm: "Language model", student: "Student", answer: "Compose" }
const INSIDE = { rank: ["llm", "student"] }
const ORDER = ["features", "route", "rank", "answer"]

export function startTimeline(session) {
  session.addEventListener("answer", ({ detail }) => byId("timeline").replaceChildren(...draw(detail.answer)))
}

function draw(answer) {
  const taken = takenMs(answer)
  return [budget(taken, answer.deadline_ms), lanes(spans(answer.stages_ms), taken)]
}

function budget(taken, deadline) {
  const used = make("span", { class: "used" })
  used.style.width = `${Math.min(100, Math.max(0.8, (100 * taken) / deadline))}%`
  const isLate = taken > deadline
  return make(
    "div",
    { class: `budget${isLate ? " late" : ""}` },
    make("span", { class: "whole", "aria-hidden": "true" }, used),
    make("span", { class: "words" }, make("b", {}, `${milliseconds(taken)} used`), ` · ${isLate ? "late" : `${milliseconds(deadline - taken)} to spare`} of ${deadline} ms`),
  )
}

// Stages run one after the other; the language model and the student run inside ranking, beside each other.
function spans(stages) {
  const found = []
  let at = 0
  for (const name of ORDER) {
    if (!(name in stages)) continue
    const inner = (INSIDE[name] ?? []).filter((other) => other in stages)
    found.push(...(inner.length ? inner : [name]).map((part) => ({ name: part, from: at, ms: stages[part] })))
    at += stages[name]
  }
  return found
}

function lanes(parts, taken) {
  return make("ol", { class: "lanes" }, ...parts.map((part) => lane(part, taken)))
}

function lane({ name, from, ms }, taken) {
  const bar = make("span", { class: "stage", data: { stage: name } })
  const share = (value) => (100 * value) / Math.max(taken, 0.001)
  bar.style.marginLeft = `${Math.min(99, share(from))}%`
  bar.style.width = `${Math.max(0.8, Math.min(share(ms), 100 - share(from)))}%`
  return make("li", {}, make("span", { class: "name" }, NAMES[name] ?? name), make("span", { class: "track", "aria-hidden": "true" }, bar), make("span", { class: "ms" }, milliseconds(ms)))
}
