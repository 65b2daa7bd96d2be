// The live bundle and its quality: each model's hit rate and NDCG, drawn as bars with their intervals, and where the LLM is called.

import { get } from "./api.js"
import { byId, make, setText } from "./dom.js"

const MODELS = {
  decoder: ["Decoder", "the language model"],
  student: ["Student", "distilled from the decoder"],
  twin: ["Twin", "the student's size, not distilled"],
  item_knn: ["Item-kNN", "items with common users"],
  bigram: ["Bigram", "first-order Markov chain"],
  popularity: ["Popularity", "one list for all users"],
}

let shown = null

export async function loadBundle() {
  try {
    const bundle = await get("/console/bundle")
    if (bundle.version !== shown) show(bundle)
    shown = bundle.version
    return bundle
  } catch (error) {
    setText(byId("bundle-note"), error.status === 401 ? "" : "The bundle could not be read.")
    return null
  }
}

function show(bundle) {
  const { quality } = bundle
  setText(byId("bundle-version"), bundle.version)
  setText(byId("bundle-note"), note(bundle))
  const tables = quality.rows.length ? [table(quality.rows)] : [make("p", { class: "note" }, "This bundle has no evaluation report.")]
  if (quality.gain.length) tables.push(gainTable(quality.gain))
  byId("bundle").replaceChildren(...tables)
}

function note({ num_items, num_parameters, multiply_adds, quality }) {
  const parts = [`${num_items.toLocaleString("en")} items`]
  if (num_parameters) parts.push(`a decoder of ${num_parameters.toLocaleString("en")} parameters`)
  if (multiply_adds.decoder && multiply_adds.student) parts.push(`a student with ${Math.round(multiply_adds.decoder / multiply_adds.student)} times fewer operations`)
  if (quality.num_test_users) parts.push(`evaluated on ${quality.num_test_users.toLocaleString("en")} users (${quality.dataset || "unnamed data"}): the next item, ranked among all, seen items removed`)
  return `${parts.join(", ")}.`
}

function table(rows) {
  const maximum = (name) => Math.max(...rows.map((row) => row[name]))
  const maxima = { hr_at_10: maximum("hr_at_10"), ndcg_at_10: Math.max(maximum("ndcg_at_10"), ...rows.map((row) => row.ndcg_interval?.[1] ?? 0)) }
  const head = make("tr", {}, ...["Model", "HR@10", "NDCG@10 with its 95 % interval"].map((text) => make("th", { scope: "col" }, text)))
  return make("table", { id: "models" }, make("thead", {}, head), make("tbody", {}, ...rows.map((row) => line(row, maxima))))
}

function gainTable(rows) {
  const head = make("tr", {}, ...["Known items of the history", "LLM minus student, NDCG@10", "Who ranks"].map((text) => make("th", { scope: "col" }, text)))
  return make("table", { id: "gain" }, make("thead", {}, head), make("tbody", {}, ...rows.map(gainLine)))
}

function gainLine({ first, last, num_test_users, llm_minus_student, interval, calls_llm }) {
  const [mean, low, high] = [llm_minus_student, ...interval].map((value) => `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(4)}`)
  return make(
    "tr",
    {},
    make("th", { scope: "row" }, last === null ? `${first} and more` : `${first} to ${last}`, make("small", {}, `${num_test_users.toLocaleString("en")} test users`)),
    make("td", {}, make("span", { class: "number" }, mean), ` (${low} to ${high})`),
    make("td", {}, calls_llm ? "the LLM" : "the student"),
  )
}

function line(row, maxima) {
  const [name, description] = MODELS[row.model] ?? [row.model, ""]
  return make(
    "tr",
    { data: { model: row.model } },
    make("th", { scope: "row" }, name, make("small", {}, description)),
    make("td", {}, bar(row.hr_at_10 / maxima.hr_at_10, null), make("span", { class: "number" }, `${(100 * row.hr_at_10).toFixed(1)} %`)),
    make("td", {}, bar(row.ndcg_at_10 / maxima.ndcg_at_10, row.ndcg_interval?.map((end) => end / maxima.ndcg_at_10)), make("span", { class: "number" }, row.ndcg_at_10.toFixed(4))),
  )
}

function bar(share, interval) {
  const fill = make("span", { class: "fill" })
  fill.style.width = `${100 * share}%`
  const whisker = interval ? make("span", { class: "whisker" }) : null
  if (whisker) {
    whisker.style.left = `${100 * interval[0]}%`
    whisker.style.width = `${100 * (interval[1] - interval[0])}%`
  }
  return make("span", { class: "cell", "aria-hidden": "true" }, fill, whisker)
}
