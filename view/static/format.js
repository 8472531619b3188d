// Quantities for people, digit for digit as core/units.py writes them.

/** The digits of |x| as Python rounds them: exactly, and ties to the even digit. */
function roundedDigits(x, count) {
  const [mantissa, power] = Math.abs(x).toExponential(80).split("e");
  const all = mantissa.replace(".", "");
  let exponent = Number(power);
  if (count < 0) return ["0", exponent];
  const rest = all.slice(count);
  const last = count ? Number(all[count - 1]) : 0;
  const half = rest[0] === "5" && /^50*$/.test(rest);
  const up = half ? last % 2 === 1 : rest >= "5";
  let digits = BigInt(all.slice(0, count) || "0") + (up ? 1n : 0n);
  let text = String(digits).padStart(count, "0");
  if (text.length > count) {
    exponent += 1;
    text = count ? text.slice(0, count) : text;
  }
  return [text, exponent];
}

/** Python's f"{x:.{decimals}f}". */
export function fixed(x, decimals) {
  if (x === 0) return (0).toFixed(decimals);
  const exponent = Number(Math.abs(x).toExponential(80).split("e")[1]);
  const [digits, found] = roundedDigits(x, exponent + 1 + decimals);
  const whole = BigInt(digits) * (found > exponent && exponent + 1 + decimals > 0 ? 10n : 1n);
  const text = String(whole).padStart(decimals + 1, "0");
  const sign = x < 0 && whole !== 0n ? "-" : "";
  return decimals ? `${sign}${text.slice(0, -decimals)}.${text.slice(-decimals)}` : sign + text;
}

/** Python's f"{x:.{count}g}". */
export function general(x, count) {
  if (x === 0) return "0";
  const [digits, exponent] = roundedDigits(x, count);
  const sign = x < 0 ? "-" : "";
  const kept = digits.replace(/0+$/, "") || "0";
  if (exponent < -4 || exponent >= count) {
    const power = String(Math.abs(exponent)).padStart(2, "0");
    const mantissa = kept.length > 1 ? `${kept[0]}.${kept.slice(1)}` : kept;
    return `${sign}${mantissa}e${exponent < 0 ? "-" : "+"}${power}`;
  }
  if (exponent < 0) return `${sign}0.${"0".repeat(-exponent - 1)}${kept}`;
  const whole = digits.slice(0, exponent + 1);
  const part = digits.slice(exponent + 1).replace(/0+$/, "");
  return sign + (part ? `${whole}.${part}` : whole);
}

export function time(seconds) {
  let value = seconds;
  let unit = "s";
  for (const [factor, name] of [[1, "s"], [1e3, "ms"], [1e6, "us"]]) {
    value = seconds * factor;
    unit = name;
    if (Math.abs(value) >= 1) break;
  }
  return `${Math.abs(value) < 1000 ? general(value, 3) : fixed(value, 0)} ${unit}`;
}

export function bytes(size) {
  let value = size;
  let unit = "B";
  for (const name of ["B", "KiB", "MiB", "GiB"]) {
    unit = name;
    if (Math.abs(value) < 1024 || name === "GiB") break;
    value /= 1024;
  }
  return `${fixed(value, unit === "B" ? 0 : 1)} ${unit}`;
}

/** Four digits, as people write numbers: 64,980 and not 6.498e+04. */
export const rate = (value) => Number(general(value, 4)).toLocaleString("en", { maximumFractionDigits: 20 });

export const percent = (share) => `${fixed(share * 100, 1)} %`;

/** The same with line ends, control and bidirectional characters escaped; core/text_table.py's printable. */
export function visible(text) {
  return text.replace(/[\p{C}\p{Z}]/gu, (character) => {
    if (character === " ") return character;
    const named = { "\t": "\\t", "\n": "\\n", "\r": "\\r" };
    const code = character.codePointAt(0);
    const [letter, digits] = code < 256 ? ["x", 2] : code < 65536 ? ["u", 4] : ["U", 8];
    return named[character] ?? `\\${letter}${code.toString(16).padStart(digits, "0")}`;
  });
}

/** What a marked element shows; `null` is said in words. */
export function shown(value, form) {
  const none = { bytes: "none", rate: "not known", gain: "cannot be compared", versus: "Faster" };
  if (value === null || value === undefined) return none[form] ?? "";
  if (form === "time") return time(value);
  if (form === "bytes") return bytes(value);
  if (form === "percent") return percent(value);
  if (form === "gain") return percent(Math.abs(value));
  if (form === "versus") return value <= -0.0005 ? "Slower" : "Faster";
  if (form === "samples") return `${value} sample${value === 1 ? "" : "s"}`;
  if (form === "micro-batches") return `${value} micro-batch${value === 1 ? "" : "es"}`;
  if (form === "rate") return rate(value);
  return visible(String(value));
}
