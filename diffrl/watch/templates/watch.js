"use strict";
// Fetches a part of the page anew when its files have changed; takes votes. Without anything from outside.
const status = document.getElementById("status");
const stamps = {};
const random = () => Array.from(crypto.getRandomValues(new Uint8Array(12)), (b) => b.toString(16).padStart(2, "0")).join("");
let voter = random();
try {
  voter = localStorage.getItem("voter") || voter;
  localStorage.setItem("voter", voter);
} catch (error) { /* a browser that keeps nothing: a new voter with each visit */ }

async function post(path, content) {
  const answer = await fetch(path, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content),
  });
  const said = await answer.json();
  if (!answer.ok) throw new Error(said.error);
  return said;
}

async function refresh() {
  try {
    const answer = await fetch("/state");
    if (answer.status === 401) return location.reload();
    const state = await answer.json();
    for (const part of document.querySelectorAll(".part")) {
      const name = part.dataset.part;
      if (state.parts[name] === stamps[name]) continue;
      const html = await fetch("/parts/" + name);
      if (!html.ok) throw new Error("no part");
      part.innerHTML = await html.text();
      stamps[name] = state.parts[name];
    }
    const left = document.getElementById("left");
    if (left && state.asked) left.textContent = Math.max(state.asked.left, 0) + " s";
    status.textContent = "live · " + new Date().toLocaleTimeString();
    status.className = "";
  } catch (error) {
    status.textContent = "no answer; the page shows what it had";
    status.className = "lost";
  }
  setTimeout(refresh, document.hidden ? 15000 : 2000);
}

const chosen = (card) => [...card.querySelectorAll(".choice")].filter((one) => one.dataset.rank)
  .sort((a, b) => a.dataset.rank - b.dataset.rank);

function number(card) {
  const order = chosen(card);
  for (const one of card.querySelectorAll(".choice")) {
    const place = order.indexOf(one);
    one.setAttribute("aria-pressed", place >= 0);
    one.querySelector(".rank").textContent = place >= 0 ? place + 1 : "";
    if (place >= 0) one.dataset.rank = place + 1; else delete one.dataset.rank;
  }
  card.querySelector(".save").disabled = !order.length;
}

async function vote(card, order) {
  const message = card.querySelector(".message");
  card.dataset.vote ||= random(); // sent again after a lost answer, it counts once
  try {
    await post("/votes", { vote: card.dataset.vote, voter, group: card.dataset.group, order });
    message.textContent = "saved";
    message.className = "message";
    for (const button of card.querySelectorAll("button")) button.disabled = true;
    card.dataset.done = "yes";
  } catch (error) {
    message.textContent = error.message;
    message.className = "message bad";
  }
}

document.addEventListener("click", async (event) => {
  const button = event.target.closest("button");
  const card = button && button.closest("article");
  if (!button) return;
  if (button.classList.contains("enough")) {
    try { await post("/go-on", { epoch: Number(button.closest(".ask").dataset.epoch) }); button.textContent = "The run goes on"; }
    catch (error) { button.textContent = error.message; }
    button.disabled = true;
    return;
  }
  if (!card) return;
  if (button.classList.contains("choice")) {
    if (button.dataset.rank) delete button.dataset.rank; else button.dataset.rank = 1e6;
    number(card);
  } else if (button.classList.contains("clear")) {
    for (const one of card.querySelectorAll(".choice")) delete one.dataset.rank;
    number(card);
  } else if (button.classList.contains("save")) {
    vote(card, chosen(card).map((one) => [Number(one.dataset.place)]));
  } else if (button.classList.contains("equal")) {
    vote(card, [[...card.querySelectorAll(".choice")].map((one) => Number(one.dataset.place))]);
  }
});

const enter = document.getElementById("enter");
if (enter) {
  enter.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await post("/enter", { token: document.getElementById("token").value });
      location.reload();
    } catch (error) {
      status.textContent = error.message;
      status.className = "lost";
    }
  });
} else {
  refresh();
}
