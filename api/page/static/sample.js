// The sample of a family at another size of micro-batches and another length, as core/requests/default_samples.py has it.

const isTokens = (tensor) => tensor.dtype === "int64" && tensor.shape.length === 2;

/** Whether samples of a family are sequences of tokens. */
export const hasLength = (usual) => Object.values(usual.inputs).some(isTokens);

/** The tokens of a sample where nobody says: as published, or the family's, or the most it takes. */
export function usualLength(usual, config, published) {
  const tokens = Object.values(usual.inputs).find(isTokens);
  const most = config.n_positions ?? config.max_position_embeddings ?? Infinity;
  return published ?? (tokens ? Math.min(tokens.shape[1], most) : null);
}

/** One micro-batch: the family's usual tensors, of so many samples, with the sizes of a configuration. */
export function sampleOf(usual, config, size, length) {
  const channels = config.num_channels ?? config.in_channels;
  const classes = config.num_labels ?? config.num_classes ?? config.output_size;
  const input = (tensor) => {
    if (isTokens(tensor)) return { ...tensor, shape: [size, length], high: config.vocab_size ?? tensor.high };
    if (tensor.shape.length === 2) return { ...tensor, shape: [size, config.input_size ?? tensor.shape[1]] };
    const [, own, ...sides] = tensor.shape;
    return { ...tensor, shape: [size, channels ?? own, ...(config.image_size ? [config.image_size, config.image_size] : sides)] };
  };
  const target = (tensor) => (isTokens(tensor) ? input(tensor)
    : { ...tensor, shape: [size, ...tensor.shape.slice(1)], high: classes === undefined ? tensor.high : Math.max(classes, 1) });
  const inputs = Object.fromEntries(Object.entries(usual.inputs).map(([name, tensor]) => [name, input(tensor)]));
  return { ...usual, inputs, target: usual.target && target(usual.target) };
}
