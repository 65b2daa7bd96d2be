// A form for the edited surface: reads its fields from the draft and writes them back; all other text is kept.

import { post } from "./api.js"
import { byId, failureText, make, setText } from "./dom.js"
import { TIERS, tierTitle } from "./text.js"

const LISTS = {
  boosts: { title: "Boosts", columns: [["attribute", "text"], ["equals", "text"], ["factor", "number"]], read: ({ where, factor }) => isPlain(where) && [where.key, where.eq, factor], write: ([key, eq, factor], one) => ({ where: { key, eq: value(eq, key, one?.where.eq) }, factor: Number(factor) }) },
  pins: { title: "Pins", columns: [["item id", "text"], ["place", "number"]], read: ({ item_id, position }) => [item_id, position], write: ([item_id, position]) => ({ item_id, position: Number(position) }) },
  blocks: { title: "Blocks", columns: [["attribute", "text"], ["equals", "text"]], read: (where) => isPlain(where) && [where.key, where.eq], write: ([key, eq], one) => ({ key, eq: value(eq, key, one?.eq) }) },
  caps: { title: "Caps", columns: [["attribute", "text"], ["at most", "number"]], read: ({ attribute, most }) => [attribute, most], write: ([attribute, most]) => ({ attribute, most: Number(most) }) },
}
const isPlain = (where) => Object.keys(where).every((name) => ["key", "eq"].includes(name)) && ["string", "number", "boolean"].includes(typeof where.eq)
const TEXTS = ["item_id", "categories"]

// The original value if unchanged; otherwise a number or flag if it parses as such, except for text attributes.
function value(text, key, before) {
  if (before !== undefined && String(before) === text) return before
  if (TEXTS.includes(key) || typeof before === "string") return text
  return ["true", "false"].includes(text) ? text === "true" : text.trim() === "" || Number.isNaN(Number(text)) ? text : Number(text)
}

// `draft` returns the text, `accept` takes a changed one, `note` shows a sentence and its kind.
export function startSurfaceForm(draft, accept, note) {
  const details = byId("surface-fields")
  const show = async () => {
    if (!details.open) return
    try {
      const { fields } = await post("/console/surfaces:form", { text: draft(), surface: byId("surface").value })
      byId("surface-form").replaceChildren(...controls(fields))
    } catch (error) {
      byId("surface-form").replaceChildren(make("p", { class: "note" }, failureText(error, "The form cannot be shown")))
    }
  }
  details.addEventListener("toggle", show)
  byId("surface").addEventListener("change", show)
  byId("surfaces-text").addEventListener("change", show)
  byId("surface-form").addEventListener("submit", async (event) => {
    event.preventDefault()
    try {
      const surface = byId("surface").value
      accept((await post("/console/surfaces:set", { text: draft(), surface, fields: filledIn() })).text)
      note(`The draft has these fields of ${surface}.`)
    } catch (error) {
      note(failureText(error, "The draft was not changed"), "bad")
    }
  })
  return show
}

function controls({ k, deadline_ms: deadlineMs, tiers, ...lists }) {
  const number = (id, label, found, most) => make("span", {}, make("label", { htmlFor: id }, label), make("input", { id, type: "number", min: 1, max: most, step: 1, value: found ?? "", placeholder: "as usual" }))
  const boxes = TIERS.map((tier) => {
    const box = make("input", { type: "checkbox", value: tier, checked: tier === "popular" || (tiers ?? TIERS).includes(tier), disabled: tier === "popular" })
    return make("label", { class: "inline" }, box, tierTitle(tier))
  })
  return [
    make("div", { class: "trial" }, number("form-k", "Items (k)", k, 1_000), number("form-deadline", "Deadline, ms", deadlineMs, 60_000)),
    make("fieldset", { id: "form-tiers", class: "boxes" }, make("legend", {}, "Tiers"), ...boxes),
    ...Object.entries(LISTS).map(([name, list]) => listControl(name, list, lists[name] ?? [])),
    make("button", { class: "main" }, "Write into the draft"),
  ]
}

function listControl(name, { title, columns, read }, found) {
  const rows = make("ul", {})
  const add = (one) => rows.append(row(title, columns, one, one === null ? columns.map(() => "") : read(one)))
  found.forEach(add)
  const button = make("button", { type: "button", class: "quiet", onclick: () => add(null) }, `Add to ${title.toLowerCase()}`)
  return make("fieldset", { data: { list: name } }, make("legend", {}, title), rows, button)
}

// One entry: its inputs, or its JSON, written back unchanged, if the form cannot show it.
function row(title, columns, one, cells) {
  const line = make("li", {})
  const inputs = cells ? columns.map(([label, type], place) => make("input", { type, value: cells[place], placeholder: label, "aria-label": `${title}: ${label}`, step: "any", required: true, autocomplete: "off" })) : [make("code", {}, JSON.stringify(one))]
  if (one) line.dataset[cells ? "before" : "kept"] = JSON.stringify(one)
  line.append(...inputs, make("button", { type: "button", class: "quiet", "aria-label": `Remove from ${title.toLowerCase()}`, onclick: () => line.remove() }, "✕"))
  return line
}

function filledIn() {
  const number = (id) => (byId(id).value === "" ? null : Number(byId(id).value))
  const boxes = [...byId("form-tiers").querySelectorAll("input")]
  const tiers = boxes.every((box) => box.checked) ? null : boxes.filter((box) => box.checked).map((box) => box.value)
  const lists = Object.entries(LISTS).map(([name, { write }]) => {
    const lines = [...byId("surface-form").querySelectorAll(`[data-list="${name}"] li`)]
    return [name, lines.map((line) => (line.dataset.kept ? JSON.parse(line.dataset.kept) : write([...line.querySelectorAll("input")].map((input) => input.value), line.dataset.before && JSON.parse(line.dataset.before))))]
  })
  return { k: number("form-k"), deadline_ms: number("form-deadline"), tiers, ...Object.fromEntries(lists) }
}
