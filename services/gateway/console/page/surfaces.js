// Surfaces: their file as text, tried on a user before it is saved. Until then the draft exists only in the page.

import { get, post, put } from "./api.js"
import { announce, byId, failureText, make, setText } from "./dom.js"
import { startSurfaceForm } from "./surfaceform.js"
import { reasonText, tierTitle } from "./text.js"

let showForm = () => {}
let saved = null // the file as it was read: its text and SHA-256

export function startSurfaces(session) {
  byId("surfaces-text").addEventListener("input", showState)
  byId("surfaces-read").addEventListener("click", loadSurfaces)
  byId("surfaces-save").addEventListener("click", save)
  byId("preview-form").addEventListener("submit", (event) => {
    event.preventDefault()
    preview()
  })
  showForm = startSurfaceForm(draft, replaceDraft, note)
  session.addEventListener("user", ({ detail }) => (byId("preview-user").value = detail.userId))
  return { boost }
}

export async function loadSurfaces() {
  try {
    accept(await get("/console/surfaces"))
    note(saved.problem ? `What is in the file is not in force: ${saved.problem}.` : "")
  } catch (error) {
    note(error.status === 401 ? "" : failureText(error, "The surfaces could not be read"))
  }
}

function accept(file) {
  saved = file
  byId("surfaces-text").value = file.text
  byId("surface-names").replaceChildren(...file.names.map((name) => make("option", { value: name })))
  if (!byId("surface").value) byId("surface").value = file.names[0] ?? ""
  setText(byId("surfaces-lock"), file.read_only ? `It can be tried here, not saved: ${file.read_only}.` : "")
  showState()
  showForm()
}

const draft = () => byId("surfaces-text").value
const isChanged = () => saved !== null && draft() !== saved.text.replaceAll("\r\n", "\n")

function showState() {
  setText(byId("surfaces-state"), isChanged() ? "draft, not saved" : "")
  byId("surfaces-save").disabled = saved === null || saved.read_only !== null || !isChanged()
  byId("surfaces-read").disabled = saved === null
}

function replaceDraft(text) {
  byId("surfaces-text").value = text
  showState()
  showForm()
}

async function save() {
  try {
    accept(await put("/console/surfaces", { text: draft(), sha256: saved.sha256 }))
    note("Saved. It is in force in every gateway within a second.", "good")
  } catch (error) {
    const hint = error.field === "sha256" ? " Copy your edit, then read the file again." : ""
    note(failureText(error, "Nothing was saved") + hint, "bad")
  }
}

async function boost(item, factor) {
  try {
    const { text } = await post("/console/surfaces:boost", { text: draft(), surface: byId("surface").value, item_id: item.item_id, factor })
    replaceDraft(text)
    note(`${item.title} counts ${factor} times on ${byId("surface").value} in the draft.`)
    await preview()
  } catch (error) {
    note(failureText(error, "The draft was not changed"), "bad")
  }
}

async function preview() {
  try {
    const { before, after } = await post("/console/surfaces:preview", { text: draft(), surface: byId("surface").value, user_id: byId("preview-user").value })
    byId("preview").replaceChildren(side("Now", before, after), side("With the draft", after, before))
    announce(`The preview is shown: ${after.items.length} items with the draft.`)
  } catch (error) {
    byId("preview").replaceChildren()
    note(failureText(error, "There is no preview"), "bad")
  }
}

// One of the two lists; each item with its move against the other list and the effect of the surface's rules.
function side(title, answer, other) {
  const isDraft = title !== "Now"
  const places = new Map(other.items.map((item, place) => [item.item_id, place]))
  const ruled = new Map(answer.ruled.map((item) => [item.item_id, item]))
  const rows = answer.items.map((item, place) => make("li", { data: { item: item.item_id } }, make("span", { class: "place" }, String(place + 1)), make("span", { class: "title" }, item.title, " ", mark(places.get(item.item_id), place, isDraft), make("small", {}, ruling(ruled.get(item.item_id))))))
  const out = answer.ruled.filter((item) => item.after === null).map((item) => item.title)
  const [head, list] = [make("h3", {}, title), make("ol", {}, ...rows)]
  const why = make("p", { class: "note" }, `${tierTitle(answer.tier)}: ${reasonText(answer.reason)}`)
  return make("div", { class: "side" }, head, why, list, out.length ? make("p", { class: "note" }, `Moved out by rules: ${out.slice(0, 5).join(", ")}${out.length > 5 ? " …" : ""}`) : null)
}

function mark(otherPlace, place, isDraft) {
  if (otherPlace === undefined) return make("span", { class: "moved", data: { kind: isDraft ? "new" : "down" } }, isDraft ? "new" : "goes")
  const steps = isDraft ? otherPlace - place : 0
  return make("span", { class: "moved", data: { kind: steps > 0 ? "up" : "down" } }, steps === 0 ? "" : `${steps > 0 ? "▲" : "▼"} ${Math.abs(steps)}`)
}

const ruling = (item) => (!item || item.before === item.after ? "" : `${item.rules.join(", ")}: ${item.before ?? "outside"} → ${item.after}`)

function note(text, kind = "") {
  const place = byId("surfaces-note")
  setText(place, text)
  place.dataset.kind = kind
}
