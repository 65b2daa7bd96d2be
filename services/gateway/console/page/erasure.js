// Erases a user after a confirmation, then polls the receipt until every store is done.

import { get, post } from "./api.js"
import { announce, byId, failureText, make, setText } from "./dom.js"

const READ_EVERY_MS = 2_000
const READ_FOR_MS = 120_000
const when = (ms) => new Date(ms).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })

export function startErasure(session) {
  const dialog = byId("erase-dialog")
  byId("erase-form").addEventListener("submit", (event) => {
    event.preventDefault()
    const userId = byId("erase-user").value.trim()
    if (!userId) return
    setText(byId("erase-title"), `Erase ${userId}?`)
    dialog.returnValue = ""
    dialog.showModal()
  })
  dialog.addEventListener("close", () => {
    if (dialog.returnValue === "erase") erase(byId("erase-user").value.trim(), session)
  })
}

async function erase(userId, session) {
  try {
    await follow(await post("/console/erasures", { user_id: userId }), () => {
      announce("The user is erased from all that answers are made of.")
      if (session.userId === userId) session.choose(userId)
    })
  } catch (error) {
    setText(byId("erase-note"), failureText(error, "The erasure failed, or its receipt could not be read"))
  }
}

let followed = null

// Shows the receipt until every store is done or another user is erased; `onOnline` is called once answers exclude the user.
async function follow(accepted, onOnline) {
  const until = performance.now() + READ_FOR_MS
  followed = accepted.erasure_id
  let [receipt, wasOnline] = [accepted, false]
  while (followed === accepted.erasure_id) {
    show(receipt)
    if (receipt.is_done_online && !wasOnline) onOnline()
    wasOnline = receipt.is_done_online
    if (receipt.is_done || performance.now() > until) return
    await new Promise((resume) => setTimeout(resume, READ_EVERY_MS))
    receipt = await get(`/console/erasures/${accepted.erasure_id}`)
  }
}

function show(receipt) {
  const state = receipt.is_done ? "Every store is done." : receipt.is_done_online ? "No answer depends on the user's past any more; files follow." : "Accepted."
  setText(byId("erase-note"), `${state} Receipt ${receipt.erasure_id}, kept for 90 days.`)
  const stores = receipt.stores.map((one) => line(one.done_time_ms === null ? "…" : "✓", one.store.replaceAll("_", " "), one.meaning))
  const rest = receipt.remaining.map((one) => line("", one.what, one.until_unix_ms === null ? one.until : `${one.until}: ${when(one.until_unix_ms)}`))
  byId("receipt").replaceChildren(make("h3", {}, "Stores"), make("ul", { id: "receipt-stores" }, ...stores), make("h3", {}, "What remains, and until when"), make("ul", {}, ...rest))
}

const line = (sign, name, meaning) => make("li", {}, make("span", { class: "sign" }, sign), make("span", {}, name, make("small", {}, meaning)))
