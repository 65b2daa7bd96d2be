// One visitor's session: asks for lists, sends clicks, and measures how long a click takes to be seen.
//
// Tells others by events: "user", "asking", "answer", "seen", "trouble".

import { get, record, recommend } from "./api.js"

const SEEN_WITHIN_MS = 5_000
const POLL_EVERY_MS = 12
const RECALL_KEY = "tailrace-user"

export class Session extends EventTarget {
  userId = null
  deadlineMs = 200
  answer = null
  isStoreOff = false
  #turn = 0
  #newestMs = 0 // of the visitor's events that an answer has seen; an answer without features has seen none
  #clicks = Promise.resolve()

  async choose(userId) {
    this.userId = userId
    this.answer = null
    this.#newestMs = 0
    this.#turn += 1
    sessionStorage.setItem(RECALL_KEY, userId)
    this.#tell("user", { userId })
    await Promise.all([this.ask(), this.readHistory()])
  }

  invent() {
    const id = Array.from(crypto.getRandomValues(new Uint8Array(3)), (byte) => byte.toString(16).padStart(2, "0")).join("")
    return this.choose(`visitor-${id}`)
  }

  recalled() {
    return sessionStorage.getItem(RECALL_KEY)
  }

  async ask() {
    if (this.userId === null) return null
    const turn = this.#turn
    this.#tell("asking")
    try {
      const answer = await recommend(this.#question(), { priority: "high" })
      if (turn === this.#turn) this.#take(answer)
      return answer
    } catch (error) {
      this.#tell("trouble", { error, doing: "ask" })
      return null
    }
  }

  // Asks now, and again while a change may still be on its way to every replica.
  askSoon(afterMs = [0, 350, 1_000, 2_500, 4_500]) {
    for (const wait of afterMs) setTimeout(() => this.ask(), wait)
  }

  // One click after the other: what is seen is told by the newest event's time.
  click(item) {
    this.#clicks = this.#clicks.then(() => this.#click(item))
    return this.#clicks
  }

  async readHistory() {
    const turn = this.#turn
    if (this.isStoreOff) {
      this.#tell("history", { error: { status: 503 } })
      return
    }
    try {
      const history = await get(`/console/history?user_id=${encodeURIComponent(this.userId)}`)
      if (turn === this.#turn) this.#tell("history", { history })
    } catch (error) {
      if (turn === this.#turn) this.#tell("history", { error })
    }
  }

  async #click(item) {
    const turn = this.#turn
    const newestBefore = this.#newestMs
    const began = performance.now()
    try {
      await record({ user_id: this.userId, item_id: item.item_id, event_type: "click", request_id: this.answer?.request_id ?? null })
    } catch (error) {
      this.#tell("trouble", { error, doing: "click", item })
      return
    }
    while (turn === this.#turn && performance.now() - began < SEEN_WITHIN_MS) {
      const answer = await this.ask()
      if (turn !== this.#turn) return
      if (this.isStoreOff) break
      if (answer && (answer.newest_event_time_ms ?? 0) > newestBefore) {
        this.#tell("seen", { item, afterMs: performance.now() - began })
        this.readHistory()
        return
      }
      await new Promise((resume) => setTimeout(resume, answer ? POLL_EVERY_MS : 10 * POLL_EVERY_MS))
    }
    this.#tell("unseen", { item })
  }

  #question() {
    return { user_id: this.userId, k: 10, deadline_ms: this.deadlineMs }
  }

  #take(answer) {
    const before = this.answer
    this.answer = answer
    this.#newestMs = Math.max(this.#newestMs, answer.newest_event_time_ms ?? 0)
    this.#tell("answer", { answer, before })
  }

  #tell(type, detail = {}) {
    this.dispatchEvent(new CustomEvent(type, { detail }))
  }
}

// The time from arrival to answer, as the service measured it.
export function takenMs(answer) {
  const stages = answer.stages_ms
  const known = ["features", "route", "rank", "answer"].filter((stage) => stage in stages)
  return known.length ? known.reduce((sum, stage) => sum + stages[stage], 0) : Object.values(stages).reduce((a, b) => a + b, 0)
}
