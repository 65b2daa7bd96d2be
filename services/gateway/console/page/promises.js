// The strip of promises: each objective, how it was kept, and how much of what may go wrong is left.

import { byId, make, setText } from "./dom.js"
import { tierTitle, percent } from "./words.js"

const SHORT = { availability: "Answered", deadline: "In time", freshness: "Fresh", agreement: "Student agrees", precomputed_age: "Lists young" }
const LATENCY = "latency_"

export function showPromises(promises, windowS) {
  setText(byId("promises-window"), windowS < 1 ? "" : `over the last ${span(windowS)}, all callers of this node`)
  const [latencies, others] = [promises.filter((one) => one.name.startsWith(LATENCY)), promises.filter((one) => !one.name.startsWith(LATENCY))]
  const tiles = others.map(tile)
  if (latencies.length) tiles.splice(2, 0, latencyTile(latencies))
  byId("promises").replaceChildren(...tiles)
}

const span = (seconds) => (seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`)

function tile(promise) {
  return make(
    "li",
    { class: "tile", data: { health: health(promise), promise: promise.name }, title: promise.title },
    make("h3", {}, SHORT[promise.name] ?? promise.name),
    make("p", { class: "value" }, `${percent(promise.good_share)} `, promise.num_total ? make("small", {}, `of ${promise.num_total.toLocaleString("en")}`) : null),
    meter(promise),
    make("p", { class: "fine" }, promise.title),
  )
}

function latencyTile(promises) {
  const lines = promises.map((promise) => {
    const tier = promise.name.slice(LATENCY.length)
    return make(
      "li",
      { data: { health: health(promise) }, title: promise.title },
      make("span", { class: "swatch", data: { tier }, "aria-hidden": "true" }),
      make("span", {}, `${tierTitle(tier)} `, make("small", {}, limitOf(promise.title))),
      make("b", {}, percent(promise.good_share)),
    )
  })
  return make("li", { class: "tile wide", data: { promise: "latency" } }, make("h3", {}, "Fast, tier by tier"), make("ul", { class: "lines" }, ...lines))
}

const limitOf = (title) => title.match(/within (\d+ m?s)/)?.[1]?.replace(/^/, "≤ ") ?? ""

function meter(promise) {
  const left = promise.budget_left === null ? 1 : Math.max(0, promise.budget_left)
  const bar = make("span")
  bar.style.width = `${100 * left}%`
  const words = promise.budget_left === null ? "nothing to count yet" : promise.budget_left < 0 ? "budget overspent" : `${Math.round(100 * left)} % of the budget left`
  return make("p", { class: "budget-left" }, make("span", { class: "meter", "aria-hidden": "true" }, bar), make("span", {}, words))
}

function health(promise) {
  if (promise.budget_left === null) return "quiet"
  return promise.budget_left < 0 ? "bad" : promise.budget_left < 0.5 ? "warn" : "good"
}
