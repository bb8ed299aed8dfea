// Browsers start no worker from a page that is opened from the disk; the search is one. There it runs in a hidden frame.
if (location.protocol === "file:") {
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      const frame = document.createElement("iframe")
      frame.hidden = true
      const start = () => {
        document.body.append(frame)
        const inner = frame.contentWindow
        const load = address => new Promise((resolve, reject) => {
          const script = inner.document.createElement("script")
          script.onload = resolve
          script.onerror = reject
          script.src = address
          inner.document.body.append(script)
        })
        inner.postMessage = data => {
          const event = new MessageEvent("message", { data })
          this.dispatchEvent(event)
          if (this.onmessage) this.onmessage(event)
        }
        inner.importScripts = async (...addresses) => { for (const address of addresses) await load(address) }
        load(new URL(url, document.baseURI).href).then(() => {
          this.inner = inner
          this.waiting.splice(0).forEach(data => this.postMessage(data))
        })
      }
      document.body ? start() : addEventListener("DOMContentLoaded", start)
      this.terminate = () => frame.remove()
    }
    postMessage(data) {
      if (!this.inner) return void this.waiting.push(data)
      const event = new MessageEvent("message", { data })
      this.inner.dispatchEvent(event)
    }
  }
}
