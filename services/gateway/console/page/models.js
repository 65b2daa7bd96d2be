// Models in memory: which process of this node holds which name, loads, and why models were unloaded.

import { get } from "./api.js"
import { byId, failureText, make, setText } from "./dom.js"

const HEADINGS = ["Part", "Process", "Name", "MiB", "Loads", "Unloaded for room", "Unloaded idle", ""]

export async function loadModels() {
  try {
    show((await get("/console/models")).models)
  } catch (error) {
    setText(byId("resident-note"), error.status === 401 ? "" : failureText(error, "The models could not be read"))
  }
}

function show(models) {
  setText(byId("resident-note"), models.length ? "Loads and unloads are those of all processes of the part since their start." : "No model is in memory.")
  byId("resident").replaceChildren(...(models.length ? [table(models)] : []))
}

function table(models) {
  const head = make("tr", {}, ...HEADINGS.map((heading) => make("th", { scope: "col" }, heading)))
  return make("table", {}, make("thead", {}, head), make("tbody", {}, ...models.map(line)))
}

function line(model) {
  const size = model.num_bytes === null ? "–" : (model.num_bytes / 2 ** 20).toFixed(1)
  const cells = [model.part, model.process, model.name, size, model.num_loads, model.num_evicted_for_room, model.num_evicted_idle]
  const state = model.has_failed ? "cannot be loaded" : ""
  return make("tr", { data: { name: model.name } }, ...[...cells, state].map((cell) => make("td", {}, String(cell))))
}
