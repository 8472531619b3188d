// The printed address carries the token behind "#", which browsers do not send anywhere.
function signIn() {
  const token = new URLSearchParams(location.hash.slice(1)).get("token");
  if (!token) return;
  history.replaceState(null, "", location.pathname + location.search);
  const form = document.querySelector("main form");
  form.elements.token.value = token;
  form.submit();
}

signIn();
addEventListener("hashchange", signIn); // pasted where this page is open already, it loads nothing
