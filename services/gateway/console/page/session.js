// The chosen user's session: requests recommendations or searches, sends clicks, and measures the time until a click is visible in an answer.
//
// Dispatches "user", "answer", "history", "click-seen", "click-unseen" and "failure".

import { get, recommend, recordEvent, search } from "./api.js"

const SEEN_WITHIN_MS = 5_000
const POLL_EVERY_MS = 12
const HISTORY_AGAIN_MS = 1_000
const USER_KEY = "tailrace-user"

export class Session extends EventTarget {
  userId = null
  deadlineMs = 200
  query = "" // of the search box; empty: recommendations
  answer = null
  isStoreOff = false
  #generation = 0 // of the chosen user; answers for an earlier one are dropped
  #newestMs = 0 // newest event time of any answer; an answer without features has none
  #clicks = Promise.resolve()
  #historyAgain = 0 // timer

  async choose(userId) {
    this.userId = userId
    this.answer = null
    this.#newestMs = 0
    this.#generation += 1
    sessionStorage.setItem(USER_KEY, userId)
    this.#emit("user", { userId })
    await Promise.all([this.request(), this.readHistory()])
  }

  chooseNew() {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(3)), (byte) => byte.toString(16).padStart(2, "0")).join("")
    return this.choose(`visitor-${id}`)
  }

  lastUserId() {
    return sessionStorage.getItem(USER_KEY)
  }

  async request() {
    if (this.userId === null) return null
    const generation = this.#generation
    try {
      const wanted = { user_id: this.userId, k: 10, deadline_ms: this.deadlineMs }
      const answer = await (this.query ? search({ q: this.query, ...wanted }, { priority: "high" }) : recommend(wanted, { priority: "high" }))
      if (generation === this.#generation) this.#accept(answer)
      return answer
    } catch (error) {
      this.#emit("failure", { error, action: "request" })
      return null
    }
  }

  // Requests now, and again while a drill may not have reached every replica.
  requestRepeatedly(afterMs = [0, 350, 1_000, 2_500, 4_500]) {
    for (const wait of afterMs) setTimeout(() => this.request(), wait)
  }

  // One click at a time: a click is visible when an answer's newest event time increases.
  click(item) {
    this.#clicks = this.#clicks.then(() => this.#click(item))
    return this.#clicks
  }

  async readHistory() {
    clearTimeout(this.#historyAgain)
    const generation = this.#generation
    if (this.isStoreOff) {
      this.#emit("history", { error: { status: 503 } })
      return
    }
    try {
      const history = await get(`/console/history?user_id=${encodeURIComponent(this.userId)}`)
      // Drop an answer from before the store was switched off.
      if (generation === this.#generation && !this.isStoreOff) this.#emit("history", { history })
    } catch (error) {
      if (generation !== this.#generation) return
      this.#emit("history", { error })
      // The store may come back; the end of a drill reaches the last gateway a second later.
      if (error.status === 503) this.#historyAgain = setTimeout(() => this.readHistory(), HISTORY_AGAIN_MS)
    }
  }

  async #click(item) {
    const generation = this.#generation
    const newestBefore = this.#newestMs
    const began = performance.now()
    try {
      await recordEvent({ user_id: this.userId, item_id: item.item_id, event_type: "click", request_id: this.answer?.request_id ?? null })
    } catch (error) {
      this.#emit("failure", { error, action: "click", item })
      return
    }
    while (generation === this.#generation && performance.now() - began < SEEN_WITHIN_MS) {
      const answer = await this.request()
      if (generation !== this.#generation) return
      if (this.isStoreOff) break
      if (answer && (answer.newest_event_time_ms ?? 0) > newestBefore) {
        this.#emit("click-seen", { item, afterMs: performance.now() - began })
        this.readHistory()
        return
      }
      await new Promise((resume) => setTimeout(resume, answer ? POLL_EVERY_MS : 10 * POLL_EVERY_MS))
    }
    this.#emit("click-unseen", { item })
  }

  #accept(answer) {
    this.answer = answer
    this.#newestMs = Math.max(this.#newestMs, answer.newest_event_time_ms ?? 0)
    this.#emit("answer", { answer })
  }

  #emit(type, detail = {}) {
    this.dispatchEvent(new CustomEvent(type, { detail }))
  }
}

// The time from arrival to answer, as the service measured it.
export function elapsedMs(answer) {
  const stages = answer.stages_ms
  const outer = ["features", "route", "rank", "answer"].filter((stage) => stage in stages)
  return outer.length ? outer.reduce((sum, stage) => sum + stages[stage], 0) : Object.values(stages).reduce((a, b) => a + b, 0)
}
