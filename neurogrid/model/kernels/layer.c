/* What stands between the products of a decoder layer: norms, rotary embedding, attention, activation. Part of kernels.c,
compiled once for each level.

A token gets the bits that it gets alone, on every level: sums go by 16 lanes, those of attention over the keys that it
sees (attention.c), and exponentials are made here.                                                                   */

/* The nearest of [low, high]; what is no number stays none. */
INLINE f32 NAME(clamp)(f32 x, float low, float high) {
  const i32 below = x < low, above = x > high, other = ~(below | above);
  return (f32)(((i32)x & other) | ((i32)((f32){0} + low) & below) | ((i32)((f32){0} + high) & above));
}

/* e^x for x in [-87, 88]; to 2 units in the last place. */
INLINE f32 NAME(power)(f32 x) {
  const f32 shifted = x * 1.44269504f + 12582912.f; /* to the nearest integer, as `quantize` does */
  const f32 whole = shifted - 12582912.f;
  const f32 rest = (x - whole * 0.693359375f) - whole * -2.12194440e-4f;
  f32 sum = (f32){0} + 1.9875691500e-4f;
  sum = sum * rest + 1.3981999507e-3f;
  sum = sum * rest + 8.3334519073e-3f;
  sum = sum * rest + 4.1665795894e-2f;
  sum = sum * rest + 1.6666665459e-1f;
  sum = sum * rest + 5.0000001201e-1f;
  sum = sum * (rest * rest) + rest + 1.f;
  return sum * (f32)(((i32)shifted - 0x4b400000 + 127) << 23);
}

/* The same, beyond that for the nearest of those. */
INLINE f32 NAME(exp)(f32 x) { return NAME(power)(NAME(clamp)(x, -87.f, 88.f)); }

/* WIDTH of a row from `at`, of which those beyond `size` are zero. */
INLINE f32 NAME(part)(const float *row, int64_t at, int64_t size) {
  float rest[WIDTH] = {0};
  if (at + WIDTH <= size) return NAME(load)(row + at);
  if (at < size) memcpy(rest, row + at, (size_t)(size - at) * 4);
  return NAME(load)(rest);
}

INLINE void NAME(store)(float *row, int64_t at, int64_t size, f32 values) {
  if (at < size) memcpy(row + at, &values, (size_t)(at + WIDTH <= size ? WIDTH : size - at) * 4);
}

/* The same of numbers of `type`. */
INLINE f32 NAME(part_of)(const void *row, int64_t at, int64_t size, int type) {
  const size_t bytes = type == NG_FLOAT32 ? 4 : 2;
  char rest[WIDTH * 4] = {0};
  if (at + WIDTH <= size) return NAME(load_scales)(row, at, type);
  if (at < size) memcpy(rest, (const char *)row + (size_t)at * bytes, (size_t)(size - at) * bytes);
  return NAME(load_scales)(rest, 0, type);
}

static void NAME(widen)(float *to, const void *from, int64_t size, int type) {
  if (type == NG_FLOAT32) memcpy(to, from, (size_t)size * 4);
  else if (type == NG_BFLOAT16) for (int64_t i = 0; i < size; i++) to[i] = from_bf16(((const uint16_t *)from)[i]);
  else for (int64_t i = 0; i < size; i++) to[i] = from_f16(((const uint16_t *)from)[i]);
}

static void NAME(narrow)(void *to, const float *from, int64_t size, int type) {
  if (type == NG_FLOAT32) memcpy(to, from, (size_t)size * 4);
  else if (type == NG_BFLOAT16) for (int64_t i = 0; i < size; i++) ((uint16_t *)to)[i] = to_bf16(from[i]);
  else for (int64_t i = 0; i < size; i++) ((uint16_t *)to)[i] = to_f16(from[i]);
}

/* [size] numbers to codes, and a scale for each G of them: the largest over 127. Element by element, and so the same
   whatever it is computed with; as coded_states.py has it, to the bit. */
static void NAME(encode)(char *to, const float *from, int64_t size) {
  for (int64_t g = 0; g < size; g += G) {
    const int64_t here = size - g < G ? size - g : G;
    float most = 0;
    for (int64_t i = 0; i < here; i++) {
      const float x = __builtin_fabsf(from[g + i]);
      most = x > most || x != x ? x : most; /* what is no number stays none */
    }
    const uint16_t bits = to_bf16(most / 127.f);
    const float scale = from_bf16(bits);
    for (int64_t i = 0; i < here; i++) {
      float code = scale > 0 ? from[g + i] / scale : 0;
      code = code > 127.f ? 127.f : code > -127.f ? code : -127.f;
      to[g + i] = (char)(int8_t)(int32_t)(code + 12582912.f - 12582912.f);
    }
    memcpy(to + size + g / G * 2, &bits, 2);
  }
}

/* WIDTH of the numbers that `encode` was given [size], from `at` on; those beyond are zero. */
INLINE f32 NAME(decode)(const char *row, int64_t at, int64_t size) {
  char rest[WIDTH] = {0};
  uint16_t scale;
  if (at >= size) return (f32){0};
  memcpy(&scale, row + size + at / G * 2, 2);
  if (at + WIDTH <= size) return NAME(from_codes)(row + at) * from_bf16(scale);
  memcpy(rest, row + at, (size_t)(size - at));
  return NAME(from_codes)(rest) * from_bf16(scale);
}

/* Bytes from the key of one token to that of the next. */
INLINE int64_t NAME(key_bytes)(const struct layer *l) {
  return l->is_coded ? l->head_size + (l->head_size + G - 1) / G * 2 : l->head_size * (l->type == NG_FLOAT32 ? 4 : 2);
}

/* Norm `which` of [count] numbers, so many together as it has; from may be to. */
static void NAME(norm)(const struct layer *l, enum norm which, float *to, const float *from, int64_t count) {
  const float *weight = l->norms[which];
  const int64_t size = l->norm_sizes[which];
  if (!weight) {
    if (to != from) memcpy(to, from, (size_t)count * 4);
    return;
  }
  for (; count > 0; count -= size, from += size, to += size) {
    f32 squares[HALVES] = {{0}};
    for (int64_t i = 0; i < size; i += LANES)
      for (int h = 0; h < HALVES; h++) {
        f32 square = NAME(part)(from, i + h * WIDTH, size);
        square *= square;
        ROUNDED(square);
        squares[h] += square;
      }
    const float inverse = 1.f / __builtin_sqrtf(NAME(sum)(squares) / (float)size + l->eps[which]);
    for (int64_t i = 0; i < size; i += WIDTH)
      NAME(store)(to, i, size, NAME(part)(from, i, size) * inverse * NAME(part)(weight, i, size));
  }
}

/* Turn the first F of each of `heads` [E] by cosines and sines [F]: number i with number F / 2 + i. */
static void NAME(rotate)(float *x, int64_t heads, int64_t size, int64_t rotary, const float *cosines,
                         const float *sines) {
  const int64_t half = rotary / 2;
  for (; heads > 0; heads--, x += size)
    for (int64_t i = 0; i < half; i += WIDTH) {
      const f32 low = NAME(part)(x, i, half), high = NAME(part)(x + half, i, half);
      f32 first = low * NAME(part)(cosines, i, half), second = high * NAME(part)(cosines + half, i, half);
      ROUNDED(first);
      ROUNDED(second);
      NAME(store)(x, i, half, first - high * NAME(part)(sines, i, half));
      NAME(store)(x + half, i, half, second + low * NAME(part)(sines + half, i, half));
    }
}

/* A product of rows in float32; by_dot, where activations are rounded to bfloat16 first. */
static int NAME(product)(const struct matrix *m, int level, const float *x, float *y, int64_t rows, uint16_t *half,
                         int threads) {
  if (m->kind != NG_BF16_DOT) return ng_multiply(m, level, x, NG_FLOAT32, y, NG_FLOAT32, rows, threads);
  NAME(narrow)(half, x, rows * m->inputs, NG_BFLOAT16);
  return ng_multiply(m, level, half, NG_BFLOAT16, y, NG_FLOAT32, rows, threads);
}

/* Add to y [outputs] what an adapter of numbers of `type` makes of x [inputs]: of one row, by itself. A and B lie one
   behind the other, and are read as one stream: no other row has them in a cache, and there is little else to do. */
INLINE void NAME(add_low_rank_of)(const struct low_rank *its, const float *x, float *y, int64_t inputs, int64_t outputs,
                                  const int type) {
  const int64_t size = type == NG_FLOAT32 ? 4 : 2, rank = its->rank, step = LANES * size;
  float low[MAX_RANK];
  const int64_t whole = inputs / (4 * LANES) * (4 * LANES);
  for (int64_t k = 0; k < rank; k++) {
    const char *row = (const char *)its->a + k * inputs * size;
    f32 sums[4][HALVES] = {{{0}}};
    for (int64_t i = 0; i < whole; i += 4 * LANES)
      UNROLL for (int j = 0; j < 4; j++) {
        if (type == NG_FLOAT32 || j % 2 == 0) __builtin_prefetch(row + (i + j * LANES) * size + PREFETCH);
        UNROLL for (int h = 0; h < HALVES; h++) {
          const int64_t at = i + j * LANES + h * WIDTH;
          sums[j][h] += NAME(load)(x + at) * NAME(load_scales)(row, at, type);
        }
      }
    for (int64_t i = whole; i < inputs; i += LANES)
      UNROLL for (int h = 0; h < HALVES; h++)
        sums[0][h] += NAME(part)(x, i + h * WIDTH, inputs) * NAME(part_of)(row, i + h * WIDTH, inputs, type);
    UNROLL for (int h = 0; h < HALVES; h++) sums[0][h] = (sums[0][h] + sums[1][h]) + (sums[2][h] + sums[3][h]);
    low[k] = NAME(sum)(sums[0]) * its->scaling;
  }
  const char *b = (const char *)its->b;
  for (int64_t o = 0; o < outputs; o += LANES) {
    f32 sums[HALVES];
    const int is_whole = o + LANES <= outputs;
    UNROLL for (int h = 0; h < HALVES; h++)
      sums[h] = is_whole ? NAME(load)(y + o + h * WIDTH) : NAME(part)(y, o + h * WIDTH, outputs);
    for (int64_t k = 0; k < rank; k++, b += step) {
      if (type == NG_FLOAT32 || k % 2 == 0) __builtin_prefetch(b + PREFETCH);
      UNROLL for (int h = 0; h < HALVES; h++) sums[h] += NAME(load_scales)(b, h * WIDTH, type) * low[k];
    }
    if (is_whole) memcpy(y + o, sums, sizeof sums);
    else UNROLL for (int h = 0; h < HALVES; h++) NAME(store)(y, o + h * WIDTH, outputs, sums[h]);
  }
}

static void NAME(add_low_rank)(const struct low_rank *its, const float *x, float *y, int64_t inputs, int64_t outputs) {
  if (!its) return;
  if (its->type == NG_FLOAT32) NAME(add_low_rank_of)(its, x, y, inputs, outputs, NG_FLOAT32);
  else if (its->type == NG_BFLOAT16) NAME(add_low_rank_of)(its, x, y, inputs, outputs, NG_BFLOAT16);
  else NAME(add_low_rank_of)(its, x, y, inputs, outputs, NG_FLOAT16);
}

/* Add to y [R, outputs], the product of a matrix with x [R, inputs], what the adapter of each row's sequence gives: of
   rows from `first` on, so many tokens of each sequence. */
static void NAME(add_each)(const struct low_rank *const *adapters, const float *x, float *y, int64_t first, int64_t rows,
                           int64_t tokens, int64_t inputs, int64_t outputs, int threads) {
  if (rows > 1 && threads > 1) {
#pragma omp parallel for schedule(dynamic) num_threads(threads)
    for (int64_t r = 0; r < rows; r++)
      NAME(add_low_rank)(adapters[(first + r) / tokens], x + r * inputs, y + r * outputs, inputs, outputs);
    return;
  }
  for (int64_t r = 0; r < rows; r++) /* a parallel region of one thread takes half a microsecond, seven times a layer */
    NAME(add_low_rank)(adapters[(first + r) / tokens], x + r * inputs, y + r * outputs, inputs, outputs);
}

static void NAME(adapt)(const struct matrix *m, enum place place, const struct block *b, const float *x, float *y) {
  if (b->adapters)
    NAME(add_each)(b->adapters + place * b->sequences, x, y, b->first, b->rows, b->tokens, m->inputs, m->outputs,
                   b->threads);
}

#include "attention.c"

/* [count] of gate, and of up, to their product after the activation; from may be to. */
static void NAME(activate)(const struct layer *l, float *to, const float *gate, const float *up, int64_t count) {
  for (int64_t i = 0; i < count; i += WIDTH) {
    const f32 x = NAME(part)(gate, i, count);
    f32 inner = x;
    if (l->activation == NG_GELU_TANH) inner = (x + x * x * x * 0.044715f) * 1.5957691216f;
    const f32 active = x / (NAME(exp)((f32){0} - inner) + 1.f);
    NAME(store)(to, i, count, active * NAME(part)(up, i, count));
  }
}

/* Of one block of rows, R of them from `first`; whose interface is in kernels.c. */
static int NAME(project_block)(const struct layer *l, int level, const struct block *b, const void *hidden,
                               const void *cosines, const void *sines, int64_t angles, float *queries, void *keys,
                               void *values, float *memory) {
  const int64_t D = l->hidden, E = l->head_size, V = l->kv_heads, F = l->rotary, R = b->rows;
  const int64_t Q = l->heads * E, K = V * E, all = Q + 2 * K, T = b->tokens;
  const int64_t bytes = l->type == NG_FLOAT32 ? 4 : 2;
  const int is_one = !l->projections[1];
  float *x = memory, *made = x + R * D, *turns = made + R * all;
  uint16_t *half = (uint16_t *)(turns + R * 2 * F);
  NAME(widen)(x, (const char *)hidden + b->first * D * bytes, R * D, l->type);
  NAME(norm)(l, NG_BEFORE_ATTENTION, x, x, R * D);
  /* Of one matrix in the rows of its result, of three one behind the other. */
  float *its[3] = {made, made + (is_one ? Q : R * Q), made + (is_one ? Q + K : R * (Q + K))};
  const int64_t sizes[3] = {Q, K, K}, strides[3] = {is_one ? all : Q, is_one ? all : K, is_one ? all : K};
  for (int i = 0; i < (is_one ? 1 : 3); i++) {
    const int failed = NAME(product)(l->projections[i], level, x, its[i], R, half, b->threads);
    if (failed) return failed;
    NAME(adapt)(l->projections[i], NG_QUERY + i, b, x, its[i]);
  }
#pragma omp parallel for if (R > FEW) num_threads(b->threads)
  for (int64_t r = 0; r < R; r++) {
    const int64_t row = (b->first + r) / T, token = (b->first + r) % T;
    const int64_t angle = ((angles > 1 ? row : 0) * T + token) * F * bytes;
    float *turn = turns + r * 2 * F;
    NAME(widen)(turn, (const char *)cosines + angle, F, l->type);
    NAME(widen)(turn + F, (const char *)sines + angle, F, l->type);
    for (int i = 0; i < 2; i++) {
      float *part = its[i] + r * strides[i];
      NAME(norm)(l, i ? NG_KEYS : NG_QUERIES, part, part, sizes[i]);
      NAME(rotate)(part, sizes[i] / E, E, F, turn, turn + F);
    }
    memcpy(queries + (b->first + r) * Q, its[0] + r * strides[0], (size_t)Q * 4);
    for (int64_t v = 0; v < V; v++) {
      const int64_t at = ((row * V + v) * T + token) * NAME(key_bytes)(l);
      const float *key = its[1] + r * strides[1] + v * E, *value = its[2] + r * strides[2] + v * E;
      if (l->is_coded) {
        NAME(encode)((char *)keys + at, key, E);
        NAME(encode)((char *)values + at, value, E);
      } else {
        NAME(narrow)((char *)keys + at, key, E, l->type);
        NAME(narrow)((char *)values + at, value, E, l->type);
      }
    }
  }
  return 0;
}

static int NAME(project)(const struct layer *l, int level, const void *hidden, int64_t rows, int64_t tokens,
                         const void *cosines, const void *sines, int64_t angles, float *queries, void *keys,
                         void *values, const struct low_rank *const *adapters, int threads) {
  const int64_t all = rows * tokens, most = all < BLOCK ? all : BLOCK;
  const int64_t floats = l->hidden + (l->heads + 2 * l->kv_heads) * l->head_size + 2 * l->rotary;
  float *memory = malloc((size_t)most * (size_t)(floats * 4 + l->hidden * 2));
  int failed = memory ? 0 : 1;
  for (int64_t first = 0; first < all && !failed; first += BLOCK) {
    const struct block b = {first, all - first < BLOCK ? all - first : BLOCK, tokens, threads, adapters, rows};
    failed = NAME(project_block)(l, level, &b, hidden, cosines, sines, angles, queries, keys, values, memory);
  }
  free(memory);
  return failed;
}

/* The keys that a token sees: those of its mask, or all up to its own. */
static struct seen NAME(seen_by)(int64_t N, int64_t token, int64_t tokens, const uint8_t *mask, int64_t place) {
  struct seen its = {0, N - (tokens - 1 - token), NULL};
  if (!mask) return its;
  its.to = N;
  if (place) { /* a ring: those ends are not the mask's */
    if (memchr(mask, 0, (size_t)N)) its.mask = mask;
    return its;
  }
  while (its.from < N && !mask[its.from]) its.from++;
  while (its.to > its.from && !mask[its.to - 1]) its.to--;
  if (memchr(mask + its.from, 0, (size_t)(its.to - its.from))) its.mask = mask;
  return its;
}

static int NAME(finish_block)(const struct layer *l, int level, const struct block *b, const void *hidden,
                              const float *queries, const struct states *keys, const struct states *values, int64_t N,
                              const struct first_key *firsts, const uint8_t *mask, void *result, void *normed,
                              void *memory) {
  const int64_t D = l->hidden, Q = l->heads * l->head_size, I = l->intermediate, R = b->rows, T = b->tokens;
  const int64_t bytes = l->type == NG_FLOAT32 ? 4 : 2;
  const int is_one = !l->gate_up[1];
  /* As large as a multiple of a cache line, what attention has much to do with. */
  const int64_t room = NAME(attention_room)(l, T);
  float *rooms = memory;
  struct seen *keys_seen = (struct seen *)(rooms + b->threads * room);
  float *seen = (float *)(keys_seen + (R + 7) / 8 * 8), *x = seen + R * Q, *h = x + R * D, *wide = h + R * D;
  uint16_t *half = (uint16_t *)(wide + R * 2 * I);
  for (int64_t r = 0; r < R; r++)
    keys_seen[r] = NAME(seen_by)(N, (b->first + r) % T, T, mask ? mask + (b->first + r) * N : NULL,
                                 firsts[(b->first + r) / T].place);
  const int64_t V = l->kv_heads, size = NAME(task_tokens)(l, b); /* one by one, as the late ones see most */
#pragma omp parallel for if (R * N > FEW_KEYS) schedule(dynamic) num_threads(b->threads)
  for (int64_t task = 0; task < (R + size - 1) / size * V; task++) {
    const int64_t first = task / V * size, last = first + size < R ? first + size : R;
    for (int64_t r = first, next; r < last; r = next) {
      next = r + T - (b->first + r) % T; /* where the next sequence begins */
      next = next < last ? next : last;
      NAME(attend)(l, b, r, next, task % V, keys_seen, queries, keys, values, N, firsts,
                   rooms + omp_get_thread_num() * room, seen);
    }
  }
  NAME(widen)(h, (const char *)hidden + b->first * D * bytes, R * D, l->type);
  int failed = NAME(product)(l->output, level, seen, x, R, half, b->threads);
  NAME(adapt)(l->output, NG_OUTPUT, b, seen, x);
  NAME(norm)(l, NG_AFTER_ATTENTION, x, x, R * D);
  for (int64_t i = 0; i < R * D; i++) h[i] += x[i];
  NAME(norm)(l, NG_BEFORE_MLP, x, h, R * D);
  if (!l->down) {
    NAME(narrow)((char *)normed + b->first * D * bytes, x, R * D, l->type);
  } else if (!failed) {
    failed = NAME(product)(l->gate_up[0], level, x, wide, R, half, b->threads);
    NAME(adapt)(l->gate_up[0], NG_GATE, b, x, wide);
    if (!failed && !is_one) {
      failed = NAME(product)(l->gate_up[1], level, x, wide + R * I, R, half, b->threads);
      NAME(adapt)(l->gate_up[1], NG_UP, b, x, wide + R * I);
    }
    /* Where one row lies behind the other, each makes room for the next. */
    if (is_one)
      for (int64_t r = 0; r < R; r++) NAME(activate)(l, wide + r * I, wide + r * 2 * I, wide + r * 2 * I + I, I);
    else {
#pragma omp parallel for if (R > FEW) num_threads(b->threads)
      for (int64_t r = 0; r < R; r++) NAME(activate)(l, wide + r * I, wide + r * I, wide + (R + r) * I, I);
    }
    if (!failed) failed = NAME(product)(l->down, level, wide, x, R, half, b->threads);
    NAME(adapt)(l->down, NG_DOWN, b, wide, x);
    NAME(norm)(l, NG_AFTER_MLP, x, x, R * D);
    for (int64_t i = 0; i < R * D; i++) h[i] += x[i];
  }
  NAME(narrow)((char *)result + b->first * D * bytes, h, R * D, l->type);
  return failed;
}

static int NAME(finish)(const struct layer *l, int level, const void *hidden, int64_t rows, int64_t tokens,
                        const float *queries, const struct states *keys, const struct states *values, int64_t N,
                        const struct first_key *firsts, const uint8_t *mask, void *result, void *normed,
                        const struct low_rank *const *adapters, int threads) {
  const int64_t D = l->hidden, Q = l->heads * l->head_size, I = l->intermediate, all = rows * tokens;
  const int64_t most = all < BLOCK ? all : BLOCK, widest = Q > I ? (Q > D ? Q : D) : (I > D ? I : D);
  const size_t floats = (size_t)(most * (Q + 2 * D + 2 * I) + threads * NAME(attention_room)(l, tokens));
  const size_t bytes = floats * 4 + (size_t)(most + 7) * sizeof(struct seen) + (size_t)(most * widest) * 2;
  void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  int failed = memory ? 0 : 1;
  for (int64_t first = 0; first < all && !failed; first += BLOCK) {
    const struct block b = {first, all - first < BLOCK ? all - first : BLOCK, tokens, threads, adapters, rows};
    failed = NAME(finish_block)(l, level, &b, hidden, queries, keys, values, N, firsts, mask, result, normed,
                                memory);
  }
  free(memory);
  return failed;
}
