// The SLO tiles: each objective, its compliance, and its remaining error budget.

import { byId, make, setText } from "./dom.js"
import { percent, tierTitle } from "./text.js"

const TITLES = { availability: "Answered", deadline: "In time", freshness: "Fresh", agreement: "Student agrees", precomputed_age: "Lists young", teacher_student: "LLM: students alike", teacher_precomputed: "LLM: lists alike" }
const DRAWN = "teacher_" // hidden unless TAILRACE_TEACHER_SHARE samples answers
const LATENCY = "latency_"

export function showSlos(slos, windowS) {
  setText(byId("slos-window"), windowS < 1 ? "" : `over the last ${duration(windowS)}, all requests to this node`)
  const latencies = slos.filter((slo) => slo.name.startsWith(LATENCY))
  const tiles = slos.filter((slo) => !slo.name.startsWith(LATENCY) && (slo.num_total > 0 || !slo.name.startsWith(DRAWN))).map(tile)
  if (latencies.length) tiles.splice(2, 0, latencyTile(latencies))
  byId("slos").replaceChildren(...tiles)
}

const duration = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`)

function tile(slo) {
  return make(
    "li",
    { class: "tile", data: { health: health(slo), slo: slo.name }, title: slo.title },
    make("h3", {}, TITLES[slo.name] ?? slo.name),
    make("p", { class: "value" }, `${percent(slo.good_share)} `, slo.num_total ? make("small", {}, `of ${slo.num_total.toLocaleString("en")}`) : null),
    budgetMeter(slo),
    make("p", { class: "fine" }, slo.title),
  )
}

function latencyTile(slos) {
  const lines = slos.map((slo) => {
    const tier = slo.name.slice(LATENCY.length)
    return make(
      "li",
      { data: { health: health(slo) }, title: slo.title },
      make("span", { class: "swatch", data: { tier }, "aria-hidden": "true" }),
      make("span", {}, `${tierTitle(tier)} `, make("small", {}, limitOf(slo.title))),
      make("b", {}, percent(slo.good_share)),
    )
  })
  return make("li", { class: "tile wide", data: { slo: "latency" } }, make("h3", {}, "Latency by tier"), make("ul", { class: "lines" }, ...lines))
}

const limitOf = (title) => title.match(/within (\d+ m?s)/)?.[1]?.replace(/^/, "≤ ") ?? ""

function budgetMeter(slo) {
  const left = slo.budget_left === null ? 1 : Math.max(0, slo.budget_left)
  const bar = make("span")
  bar.style.width = `${100 * left}%`
  const text = slo.budget_left === null ? "no events yet" : slo.budget_left < 0 ? "budget exceeded" : `${Math.round(100 * left)} % of the budget left`
  return make("p", { class: "budget-left" }, make("span", { class: "meter", "aria-hidden": "true" }, bar), make("span", {}, text))
}

function health(slo) {
  if (slo.budget_left === null) return "none"
  return slo.budget_left < 0 ? "bad" : slo.budget_left < 0.5 ? "warn" : "good"
}
