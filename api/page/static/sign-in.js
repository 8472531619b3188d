// The printed address carries the token behind "#", which browsers do not send anywhere.
async function signIn() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname + location.search);
  const form = document.querySelector("main form");
  form.elements.token.value = token;
  if (!await isSignedIn()) return form.submit();
  // Anybody can make such an address: nobody gets into another's project by a link alone.
  document.getElementById("other").hidden = false;
  document.querySelector("#other a").focus();
}

/** Asked of the server: a session's cookie is read by no script, nor sent by a link from elsewhere. */
async function isSignedIn() {
  try {
    const page = await (await fetch("/sign-in")).text();
    const form = new DOMParser().parseFromString(page, "text/html").querySelector("main form");
    return form.dataset.session !== "none";
  } catch {
    return true;
  }
}

signIn();
addEventListener("hashchange", signIn); // pasted where this page is open already, it loads nothing
