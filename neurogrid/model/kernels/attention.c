/* Attention of a layer: softmax(queries keys) values. Part of layer.c, compiled once for each level.

A query gets the bits that it gets alone, whichever others are there, on every level. So there is one order of sums, and
it hangs on positions alone. A score is 16 sums of every 16th element, which are added in pairs (`sum`). Keys are taken
by blocks of KEY_BLOCK positions. Of a block a query takes the largest score so far from all; its sum of powers has 16
lanes, by position; one value is added after the other. Where a later block has a larger score, what was summed until
then is scaled to it. A block of which a query sees nothing changes nothing, and of what no query sees nothing is read.

Two ways make these sums. Few queries (`queries`) meet a key as its elements lie, 16 of them at a time: a token that is
decoded reads keys and values once, and does little besides. Many of them (`attend_tiles`) are lanes themselves, TILE of
them beside each other; a block of keys and values stays in a cache for all tiles of a task, codes are decoded once for
all, and a number that was loaded goes into several sums. They need memory for a block, however many keys there are.  */

/* The larger one; b where a is no number. */
INLINE f32 NAME(max)(f32 a, f32 b) {
#if defined(__aarch64__)
  return (f32)vbslq_f32(vcgtq_f32((float32x4_t)a, (float32x4_t)b), (float32x4_t)a, (float32x4_t)b);
#elif defined(NG_AVX2)
  return (f32)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return (f32)_mm512_max_ps((__m512)a, (__m512)b);
#endif
}

/* `exp` of what is not above 0. */
INLINE f32 NAME(exp_below)(f32 x) { return NAME(power)(NAME(max)((f32){0} - 87.f, x)); }

#undef TILE
#undef MOST
#define TILE (2 * WIDTH)           /* queries that are lanes beside each other */
#define MOST (WIDTH == 16 ? 8 : 4) /* of few queries, those that a key meets together: their sums fill the registers */
#define ROW (KEY_BLOCK + LANES)    /* scores of one of few queries */
#define NG_CODED 3                 /* a type of keys and values, beside those of numbers */

/* Lane I of what is added: of the first half of its key's lanes, in the first key or the second. */
#define AT(I) ((I) % (WIDTH / 2) / size * 2 * size + (I) % (WIDTH / 2) % size + (I) / (WIDTH / 2) * WIDTH)
#define AT4(I) AT(I), AT(I + 1), AT(I + 2), AT(I + 3)
#undef ALL
#if WIDTH == 16
#define ALL AT4(0), AT4(4), AT4(8), AT4(12)
#elif WIDTH == 8
#define ALL AT4(0), AT4(4)
#else
#define ALL AT4(0)
#endif

/* Sums of WIDTH keys, of 16 lanes each, as `sum` makes them: in pairs, of which each step adds the halves. */
INLINE f32 NAME(sum_each)(f32 v[WIDTH][HALVES]) {
  f32 each[WIDTH];
  UNROLL for (int i = 0; i < WIDTH; i++) {
#if HALVES == 4
    each[i] = (v[i][0] + v[i][2]) + (v[i][1] + v[i][3]);
#elif HALVES == 2
    each[i] = v[i][0] + v[i][1];
#else
    each[i] = v[i][0];
#endif
  }
  UNROLL for (int size = WIDTH / 2; size > 0; size /= 2) {
    const i32 low = {ALL}, high = low + size;
    UNROLL for (int i = 0; i < size; i++)
      each[i] = __builtin_shuffle(each[2 * i], each[2 * i + 1], low) +
                __builtin_shuffle(each[2 * i], each[2 * i + 1], high);
  }
  return each[0];
}
#undef AT
#undef AT4

/* The largest lane. */
INLINE float NAME(largest)(f32 v) {
  float lanes[WIDTH];
  memcpy(lanes, &v, sizeof v);
  UNROLL for (int size = WIDTH / 2; size > 0; size /= 2)
    UNROLL for (int i = 0; i < size; i++) lanes[i] = lanes[i] > lanes[i + size] ? lanes[i] : lanes[i + size];
  return lanes[0];
}

/* A score that comes to softcap * tanh(score / softcap). */
INLINE f32 NAME(capped)(f32 score, float softcap) {
  return softcap - 2.f * softcap / (NAME(exp)(score * (2.f / softcap)) + 1.f);
}

/* WIDTH numbers of a key or value of E, from `at` on; those beyond are zero, of a whole one there are none. */
INLINE f32 NAME(numbers)(const char *row, int64_t at, int64_t E, const int type, const int is_whole) {
  uint16_t scale;
  if (is_whole && type == NG_CODED) {
    memcpy(&scale, row + E + at / G * 2, 2);
    return NAME(from_codes)(row + at) * from_bf16(scale);
  }
  if (is_whole) return NAME(load_scales)(row, at, type);
  return type == NG_CODED ? NAME(decode)(row, at, E) : NAME(part_of)(row, at, E, type);
}

/* Add to each of B results, from element e on, what its powers make of `count` values: one after the other. */
INLINE void NAME(add_values)(float *const *results, const float *powers, int64_t next_key, int64_t next_query,
                             const char *values, int64_t stride, int64_t e, int64_t E, int64_t count, const int B,
                             const int CHUNKS, const int type, const int is_whole) {
  f32 sums[16];
  UNROLL for (int b = 0; b < B; b++)
    UNROLL for (int c = 0; c < CHUNKS; c++)
      sums[b * CHUNKS + c] =
          is_whole ? NAME(load)(results[b] + e + c * WIDTH) : NAME(part)(results[b], e + c * WIDTH, E);
  for (int64_t n = 0; n < count; n++) {
    const char *value = values + n * stride;
    f32 v[4];
    UNROLL for (int c = 0; c < CHUNKS; c++)
      v[c] = NAME(numbers)(value, e + c * WIDTH, E, type, is_whole);
    UNROLL for (int b = 0; b < B; b++)
      UNROLL for (int c = 0; c < CHUNKS; c++) sums[b * CHUNKS + c] += v[c] * powers[n * next_key + b * next_query];
  }
  UNROLL for (int b = 0; b < B; b++)
    UNROLL for (int c = 0; c < CHUNKS; c++) NAME(store)(results[b], e + c * WIDTH, E, sums[b * CHUNKS + c]);
}

/* The same of one query, all elements. */
static void NAME(add_values_of_one)(float *result, const float *powers, int64_t next_key, const char *values,
                                    int64_t stride, int64_t E, int64_t count, int type) {
  for (int64_t e = 0; e < E && count > 0; e += WIDTH)
    NAME(add_values)(&result, powers, next_key, 0, values, stride, e, E, count, 1, 1, type, 0);
}

/* The same of B queries, each of which sees the keys [from, to) of a block: those that all see are read once for all.
   The values are those of the block, from its first one on. */
INLINE void NAME(add_block)(float *const *results, const float *powers, int64_t next_key, int64_t next_query,
                            const char *values, int64_t stride, int64_t E, const int32_t *from, const int32_t *to,
                            const int B, const int CHUNKS, const int type) {
  int64_t first = from[0], last = to[0];
  for (int b = 1; b < B; b++) {
    first = from[b] > first ? from[b] : first;
    last = to[b] < last ? to[b] : last;
  }
  if (last < first) last = first; /* none that all see; each then its own */
  for (int b = 0; b < B; b++) {
    const int64_t before = first < to[b] ? first : to[b];
    NAME(add_values_of_one)(results[b], powers + from[b] * next_key + b * next_query, next_key,
                            values + from[b] * stride, stride, E, before - from[b], type);
  }
  if (E % (CHUNKS * WIDTH) == 0)
    for (int64_t e = 0; e < E && first < last; e += CHUNKS * WIDTH)
      NAME(add_values)(results, powers + first * next_key, next_key, next_query, values + first * stride, stride, e, E,
                       last - first, B, CHUNKS, type, 1);
  else
    for (int64_t e = 0; e < E && first < last; e += WIDTH)
      NAME(add_values)(results, powers + first * next_key, next_key, next_query, values + first * stride, stride, e, E,
                       last - first, B, 1, type, 0);
  for (int b = 0; b < B; b++) {
    const int64_t after = last > from[b] ? last : from[b];
    NAME(add_values_of_one)(results[b], powers + after * next_key + b * next_query, next_key, values + after * stride,
                            stride, E, to[b] - after, type);
  }
}

static void NAME(scale)(float *row, int64_t size, float by) {
  for (int64_t e = 0; e < size; e += WIDTH) NAME(store)(row, e, size, NAME(part)(row, e, size) * by);
}

/* ---------------------------------------------------------------------------------------------- few queries */

/* The place of key n, counted from the earliest on. */
INLINE int64_t NAME(place)(const struct head_states *its, int64_t n) {
  const int64_t place = its->first.place + n;
  return place < its->N ? place : place - its->N;
}

/* Scores of a block to their powers, for one query that sees those [from, to) of them; its largest score and its sums
   until then go on. What these are to be scaled by. The block begins at key `start`. */
static float NAME(soften)(const struct layer *l, const struct head_states *its, const uint8_t *mask, float *scores,
                          int64_t start, int64_t from, int64_t to, float *largest, f32 *sums) {
  const float unseen = -INFINITY, before = *largest;
  const int64_t first = from / LANES * LANES, last = (to + LANES - 1) / LANES * LANES;
  if (from >= to) return 1;
  for (int64_t n = from; n < to && l->softcap > 0; n += WIDTH)
    NAME(store)(scores, n, to, NAME(capped)(NAME(part)(scores, n, to), l->softcap));
  for (int64_t n = from; n < to && mask; n++)
    if (!mask[NAME(place)(its, start + n)]) scores[n] = unseen;
  for (int64_t n = first; n < from; n++) scores[n] = unseen;
  for (int64_t n = to; n < last; n++) scores[n] = unseen;
  f32 most = (f32){0} + before;
  for (int64_t n = first; n < last; n += WIDTH) most = NAME(max)(NAME(load)(scores + n), most);
  const float now = *largest = NAME(largest)(most);
  float by = 1;
  if (now != before) {
    by = NAME(exp_below)((f32){0} + (before - now))[0];
    UNROLL for (int h = 0; h < HALVES; h++) {
      f32 scaled = sums[h] * by;
      ROUNDED(scaled);
      sums[h] = scaled;
    }
  }
  for (int64_t n = first; n < last; n += LANES)
    UNROLL for (int h = 0; h < HALVES; h++) {
      const f32 score = NAME(load)(scores + n + h * WIDTH);
      f32 power = NAME(exp_below)(score - now);
      power = (f32)((i32)power & (score != unseen)); /* what is no number stays none */
      sums[h] += power;
      memcpy(scores + n + h * WIDTH, &power, sizeof power);
    }
  return by;
}

/* Scores of B queries, 16 elements of each after another, with `count` keys; those of a query ROW behind the last
   one's. */
INLINE void NAME(score_few)(const float *queries, const char *keys, int64_t stride, int64_t E, int64_t count,
                            float scaling, float *scores, const int B, const int type, const int is_whole) {
  for (int64_t n = 0; n < count; n += WIDTH) {
    const int64_t here = count - n < WIDTH ? count - n : WIDTH;
    f32 parts[8][WIDTH][HALVES];
    for (int64_t i = 0; i < here; i++) {
      const char *key = keys + (n + i) * stride;
      f32 sums[8 * HALVES];
      UNROLL for (int j = 0; j < B * HALVES; j++) sums[j] = (f32){0};
      for (int64_t e = 0; e < E; e += LANES)
        UNROLL for (int h = 0; h < HALVES; h++) {
          const f32 k = NAME(numbers)(key, e + h * WIDTH, E, type, is_whole);
          UNROLL for (int b = 0; b < B; b++)
            sums[b * HALVES + h] += k * NAME(load)(queries + e * B + b * LANES + h * WIDTH);
        }
      UNROLL for (int b = 0; b < B; b++)
        UNROLL for (int h = 0; h < HALVES; h++) parts[b][i][h] = sums[b * HALVES + h];
    }
    for (int b = 0; b < B; b++) {
      for (int64_t i = here; i < WIDTH; i++)
        for (int h = 0; h < HALVES; h++) parts[b][i][h] = (f32){0};
      NAME(store)(scores + b * ROW, n, count, NAME(sum_each)(parts[b]) * scaling);
    }
  }
}

/* Attention of B queries over the keys [from, to), of which each sees its own. */
INLINE void NAME(queries)(const struct layer *l, const float *queries, const struct seen *seen,
                          const struct head_states *its, int64_t from, int64_t to, float *scores,
                          float *const *results, const int B, const int CHUNKS, const int type) {
  const int64_t E = l->head_size;
  float largest[8], sum;
  int32_t firsts[8], lasts[8];
  f32 sums[8][HALVES] = {{{0}}};
  for (int b = 0; b < B; b++) {
    largest[b] = -INFINITY;
    memset(results[b], 0, (size_t)E * 4);
  }
  for (int64_t n = from, next; n < to; n = next) {
    const int64_t start = n - (its->first.position + n) % KEY_BLOCK; /* where the block begins, or would */
    next = start + KEY_BLOCK < to ? start + KEY_BLOCK : to;
    /* Those whose places lie one behind the other: all, or, of a ring, up to its last place, and the rest. */
    int64_t ends[2] = {next, next}, at = n;
    if (NAME(place)(its, n) + next - n > its->N) ends[0] = n + its->N - NAME(place)(its, n);
    for (int part = 0; part < 2; at = ends[part++]) {
#define SCORE(IS_WHOLE)                                                                                                \
  NAME(score_few)(queries, its->keys + NAME(place)(its, at) * its->key_stride, its->key_stride, E, ends[part] - at,    \
                  l->scaling, scores + (at - start), B, type, IS_WHOLE)
      if (E % LANES == 0) SCORE(1);
      else SCORE(0);
#undef SCORE
    }
    for (int b = 0; b < B; b++) {
      firsts[b] = (int32_t)((seen[b].from > n ? seen[b].from < next ? seen[b].from : next : n) - start);
      lasts[b] = (int32_t)((seen[b].to < next ? seen[b].to > n ? seen[b].to : n : next) - start);
      if (lasts[b] < firsts[b]) lasts[b] = firsts[b];
      const float by = NAME(soften)(l, its, seen[b].mask, scores + b * ROW, start, firsts[b], lasts[b], largest + b,
                                    sums[b]);
      if (by != 1) NAME(scale)(results[b], E, by);
    }
    at = n;
    for (int part = 0; part < 2; at = ends[part++]) {
      int32_t from_here[8], to_here[8];
      for (int b = 0; b < B; b++) {
        from_here[b] = (int32_t)(firsts[b] > at - start ? firsts[b] : at - start);
        to_here[b] = (int32_t)(lasts[b] < ends[part] - start ? lasts[b] : ends[part] - start);
        if (to_here[b] < from_here[b]) to_here[b] = from_here[b];
      }
      if (at < ends[part])
        NAME(add_block)(results, scores, 1, ROW,
                        its->values + (NAME(place)(its, at) - (at - start)) * its->value_stride, its->value_stride, E,
                        from_here, to_here, B, CHUNKS, type);
    }
  }
  for (int b = 0; b < B; b++) {
    sum = NAME(sum)(sums[b]);
    NAME(scale)(results[b], E, 1.f / sum);
  }
}

/* ---------------------------------------------------------------------------------------------- many queries */

/* Queries that are lanes: the first `count` of them, behind which are copies of the first. */
struct NAME(tile) {
  float *queries; /* [elements][TILE] */
  float sums[LANES][TILE], largest[TILE], scale[TILE];
  int32_t first[TILE], last[TILE]; /* of a block, the keys that each sees */
  struct seen seen[TILE];
  float *results[TILE];
  int64_t count, from, to; /* the keys that any of them sees */
  int is_masked;
} __attribute__((aligned(64)));

/* The sums of every 16th element, for a tile and K keys. */
INLINE void NAME(score_lane)(const float *queries, const float *keys, int64_t stride, int64_t E, const int lane,
                             f32 *sums, const int K) {
  UNROLL for (int s = 0; s < 2 * K; s++) sums[s] = (f32){0};
  for (int64_t e = lane; e < E; e += LANES) {
    const f32 low = NAME(load)(queries + e * TILE), high = NAME(load)(queries + e * TILE + WIDTH);
    UNROLL for (int k = 0; k < K; k++) {
      sums[2 * k] += low * keys[k * stride + e];
      sums[2 * k + 1] += high * keys[k * stride + e];
    }
  }
}

/* Scores of a tile with K keys; E elements, a multiple of 16. Every 16th of them is one sum; those are added in pairs
   as soon as there are two. */
INLINE void NAME(score_keys)(const float *queries, const float *keys, int64_t stride, int64_t E, float scaling,
                             float *scores, const int K) {
  f32 pairs[4][8], sums[8];
#define LANE(I) NAME(score_lane)(queries, keys, stride, E, I, sums, K)
#define KEEP(LEVEL) UNROLL for (int s = 0; s < 2 * K; s++) pairs[LEVEL][s] = sums[s]
#define ADD(LEVEL) UNROLL for (int s = 0; s < 2 * K; s++) sums[s] += pairs[LEVEL][s]
#define FOUR(I) LANE(I); KEEP(0); LANE(I + 8); ADD(0); KEEP(1); LANE(I + 4); KEEP(0); LANE(I + 12); ADD(0); ADD(1)
  FOUR(0); KEEP(2); FOUR(2); ADD(2); KEEP(3);
  FOUR(1); KEEP(2); FOUR(3); ADD(2); ADD(3);
#undef FOUR
#undef ADD
#undef KEEP
#undef LANE
  UNROLL for (int s = 0; s < 2 * K; s++) {
    sums[s] *= scaling;
    memcpy(scores + s * WIDTH, &sums[s], sizeof *sums);
  }
}

static void NAME(score_many)(const float *queries, const float *keys, int64_t stride, int64_t E, int64_t count,
                             float scaling, float *scores) {
  int64_t n = 0;
  for (; n + 4 <= count; n += 4) {
    if (E == 64) NAME(score_keys)(queries, keys + n * stride, stride, 64, scaling, scores + n * TILE, 4);
    else NAME(score_keys)(queries, keys + n * stride, stride, E, scaling, scores + n * TILE, 4);
  }
  for (; n < count; n++) NAME(score_keys)(queries, keys + n * stride, stride, E, scaling, scores + n * TILE, 1);
}

/* Scores of a block, of its keys [from, to), to their powers, as `soften` does for each query. */
static void NAME(soften_tile)(const struct layer *l, struct NAME(tile) *tile, float *scores, int64_t start,
                              int64_t from, int64_t to) {
  const float unseen = -INFINITY;
  int is_cut = 0;
  for (int q = 0; q < TILE; q++) {
    const int64_t first = tile->seen[q].from - start, last = tile->seen[q].to - start;
    tile->first[q] = (int32_t)(first < from ? from : first > to ? to : first);
    tile->last[q] = (int32_t)(last > to ? to : last < tile->first[q] ? tile->first[q] : last);
    is_cut |= tile->first[q] > from || tile->last[q] < to;
  }
  for (int half = 0; half < 2; half++) {
    float *const its = scores + half * WIDTH;
    for (int64_t n = from; n < to && l->softcap > 0; n++) {
      const f32 score = NAME(capped)(NAME(load)(its + n * TILE), l->softcap);
      memcpy(its + n * TILE, &score, sizeof score);
    }
    if (is_cut) {
      i32 first, last;
      memcpy(&first, tile->first + half * WIDTH, sizeof first);
      memcpy(&last, tile->last + half * WIDTH, sizeof last);
      for (int64_t n = from; n < to; n++) {
        const i32 is_seen = (first <= (int32_t)n) & (last > (int32_t)n);
        const f32 score = NAME(load)(its + n * TILE), none = (f32){0} + unseen;
        const f32 left = (f32)(((i32)score & is_seen) | ((i32)none & ~is_seen));
        memcpy(its + n * TILE, &left, sizeof left);
      }
    }
    for (int q = half * WIDTH; q < (half + 1) * WIDTH && tile->is_masked; q++)
      for (int64_t n = tile->first[q]; n < tile->last[q] && tile->seen[q].mask; n++)
        if (!tile->seen[q].mask[start + n]) scores[n * TILE + q] = unseen;
    const f32 before = NAME(load)(tile->largest + half * WIDTH);
    f32 now = before;
    for (int64_t n = from; n < to; n++) now = NAME(max)(NAME(load)(its + n * TILE), now);
    const i32 is_same = now == before;
    const f32 by = (f32)(((i32)NAME(exp_below)(before - now) & ~is_same) | ((i32)((f32){0} + 1.f) & is_same));
    memcpy(tile->largest + half * WIDTH, &now, sizeof now);
    memcpy(tile->scale + half * WIDTH, &by, sizeof by);
    for (int i = 0; i < LANES; i++) {
      float *const sum = tile->sums[i] + half * WIDTH;
      f32 scaled = NAME(load)(sum) * by;
      ROUNDED(scaled);
      memcpy(sum, &scaled, sizeof scaled);
    }
    for (int64_t n = from; n < to; n++) {
      float *const sum = tile->sums[n % LANES] + half * WIDTH;
      const f32 score = NAME(load)(its + n * TILE);
      f32 power = NAME(exp_below)(score - now);
      power = (f32)((i32)power & (score != unseen));
      const f32 more = NAME(load)(sum) + power;
      memcpy(its + n * TILE, &power, sizeof power);
      memcpy(sum, &more, sizeof more);
    }
  }
}

/* What the keys or values [from, to) of a sequence are in float32, rows of E; where they lie so, those. */
static const float *NAME(opened)(const char *states, int64_t stride, int64_t from, int64_t to, int64_t size, int64_t E,
                                 int type, float *room, int64_t *next) {
  if (type == NG_FLOAT32 && size == E) {
    *next = stride / 4;
    return (const float *)(states + from * stride);
  }
  for (int64_t n = from; n < to; n++)
    for (int64_t e = 0; e < E; e += WIDTH) {
      const f32 part = type == NG_CODED ? NAME(decode)(states + n * stride, e, size)
                                        : NAME(part_of)(states + n * stride, e, size, type);
      memcpy(room + (n - from) * E + e, &part, sizeof part);
    }
  *next = E;
  return room;
}

/* Floats that the tiles of a task need. */
INLINE int64_t NAME(tiles_room)(int64_t E) { return TASK_QUERIES * E + KEY_BLOCK * TILE + 2 * KEY_BLOCK * E; }

/* Attention of the queries of `tiles`, as `queries` does it for few. */
static void NAME(attend_tiles)(const struct layer *l, struct NAME(tile) *tiles, int64_t count,
                               const struct head_states *its, int type, float *room) {
  const int64_t size = l->head_size, E = (size + LANES - 1) / LANES * LANES;
  float *scores = room + TASK_QUERIES * E, *keys_room = scores + KEY_BLOCK * TILE;
  float *values_room = keys_room + KEY_BLOCK * E;
  int64_t from = tiles[0].from, to = tiles[0].to;
  for (int64_t t = 1; t < count; t++) {
    from = tiles[t].from < from ? tiles[t].from : from;
    to = tiles[t].to > to ? tiles[t].to : to;
  }
  for (int64_t n = from, next; n < to; n = next) {
    const int64_t start = n - (its->first.position + n) % KEY_BLOCK;
    int64_t key_next, value_next;
    next = start + KEY_BLOCK < to ? start + KEY_BLOCK : to;
    const float *keys = NAME(opened)(its->keys, its->key_stride, n, next, size, E, type, keys_room, &key_next);
    const float *values = NAME(opened)(its->values, its->value_stride, n, next, size, E, type, values_room,
                                       &value_next);
    for (int64_t t = 0; t < count; t++) {
      struct NAME(tile) *tile = tiles + t;
      const int64_t first = tile->from > n ? tile->from : n, last = tile->to < next ? tile->to : next;
      if (first >= last) continue;
      NAME(score_many)(tile->queries, keys + (first - n) * key_next, key_next, E, last - first, l->scaling,
                       scores + (first - start) * TILE);
      NAME(soften_tile)(l, tile, scores, start, first - start, last - start);
      for (int q = 0; q < tile->count; q++)
        if (tile->scale[q] != 1) NAME(scale)(tile->results[q], size, tile->scale[q]);
      int q = 0;
      for (; q + 4 <= tile->count; q += 4)
        NAME(add_block)(tile->results + q, scores + q, TILE, 1, (const char *)(values - (n - start) * value_next),
                        value_next * 4, size, tile->first + q, tile->last + q, 4, WIDTH == 8 ? 2 : 4, NG_FLOAT32);
      for (; q < tile->count; q++)
        NAME(add_block)(tile->results + q, scores + q, TILE, 1, (const char *)(values - (n - start) * value_next),
                        value_next * 4, size, tile->first + q, tile->last + q, 1, 4, NG_FLOAT32);
    }
  }
  for (int64_t t = 0; t < count; t++)
    for (int q = 0; q < tiles[t].count; q++) {
      float lanes[LANES];
      f32 sums[HALVES];
      for (int i = 0; i < LANES; i++) lanes[i] = tiles[t].sums[i][q];
      UNROLL for (int h = 0; h < HALVES; h++) sums[h] = NAME(load)(lanes + h * WIDTH);
      NAME(scale)(tiles[t].results[q], size, 1.f / NAME(sum)(sums));
    }
}

/* ---------------------------------------------------------------------------------------------- both */

/* Attention of the tokens [first, last) of a block, which are of one sequence, with one head of keys. The room is of
   `attention_room`. */
static void NAME(attend)(const struct layer *l, const struct block *b, int64_t first, int64_t last, int64_t head,
                         const struct seen *seen, const float *queries, const struct states *keys,
                         const struct states *values, int64_t N, const struct first_key *firsts, float *room,
                         float *result) {
  const int64_t E = l->head_size, H = l->heads, group = H / l->kv_heads, row = (b->first + first) / b->tokens;
  const int64_t all = (last - first) * group, padded = (E + LANES - 1) / LANES * LANES;
  const int type = l->is_coded ? NG_CODED : l->type, bytes = l->is_coded ? 1 : l->type == NG_FLOAT32 ? 4 : 2;
  const struct head_states its = {
      (const char *)keys->first + (row * keys->row + head * keys->head) * bytes,
      (const char *)values->first + (row * values->row + head * values->head) * bytes,
      keys->token * bytes, values->token * bytes, N, firsts[row]};
  const int is_many = all > WIDTH && !its.first.place; /* of a ring there is one token */
  queries += b->first * H * E;
  /* Query i of them: token first + i / group, head i % group of those that have this one of keys. */
#define TOKEN(I) (first + (I) / group)
#define PLACE(I) ((TOKEN(I) * H + head * group + (I) % group) * E)
  for (int64_t i = 0; i < all && is_many; i += TASK_QUERIES) {
    struct NAME(tile) tiles[TASK_QUERIES / TILE];
    int64_t t = 0;
    for (int64_t at = i; at < all && at < i + TASK_QUERIES; at += TILE, t++) {
      struct NAME(tile) *tile = tiles + t;
      tile->count = all - at < TILE ? all - at : TILE;
      tile->queries = room + t * TILE * padded;
      tile->from = INT64_MAX;
      tile->to = tile->is_masked = 0;
      memset(tile->sums, 0, sizeof tile->sums);
      memset(tile->queries + E * TILE, 0, (size_t)((padded - E) * TILE) * 4);
      for (int q = 0; q < TILE; q++) {
        const int64_t mine = q < tile->count ? at + q : at;
        for (int64_t e = 0; e < E; e++) tile->queries[e * TILE + q] = queries[PLACE(mine) + e];
        tile->seen[q] = seen[TOKEN(mine)];
        tile->largest[q] = -INFINITY;
        tile->results[q] = result + PLACE(mine);
        tile->from = tile->seen[q].from < tile->from ? tile->seen[q].from : tile->from;
        tile->to = tile->seen[q].to > tile->to ? tile->seen[q].to : tile->to;
        tile->is_masked |= tile->seen[q].mask != NULL;
      }
      for (int q = 0; q < tile->count; q++) memset(tile->results[q], 0, (size_t)E * 4);
    }
    NAME(attend_tiles)(l, tiles, t, &its, type, room);
  }
  for (int64_t i = is_many ? all : 0, B; i < all; i += B) {
    float *scores = room + MOST * padded, *results[8];
    struct seen its_seen[8];
    int64_t from = INT64_MAX, to = 0;
    B = all - i >= 8 && MOST == 8 ? 8 : all - i >= 4 ? 4 : all - i >= 2 ? 2 : 1;
    for (int64_t j = 0; j < B; j++) {
      for (int64_t e = 0; e < padded; e += WIDTH) {
        const f32 part = NAME(part)(queries + PLACE(i + j), e, E);
        memcpy(room + e / LANES * LANES * B + j * LANES + e % LANES, &part, sizeof part);
      }
      results[j] = result + PLACE(i + j);
      its_seen[j] = seen[TOKEN(i + j)];
      from = its_seen[j].from < from ? its_seen[j].from : from;
      to = its_seen[j].to > to ? its_seen[j].to : to;
    }
#define QUERIES_OF(HOW_MANY, CHUNKS, TYPE) \
  NAME(queries)(l, room, its_seen, &its, from, to, scores, results, HOW_MANY, CHUNKS, TYPE)
#define QUERIES(HOW_MANY, CHUNKS)                                   \
  if (type == NG_CODED) QUERIES_OF(HOW_MANY, CHUNKS, NG_CODED);     \
  else if (type == NG_FLOAT32) QUERIES_OF(HOW_MANY, CHUNKS, NG_FLOAT32); \
  else QUERIES_OF(HOW_MANY, CHUNKS, type)
    if (B == 8) {
#if WIDTH == 16
      QUERIES(8, 2);
#endif
    } else if (B == 4) {
      QUERIES(4, 2);
    } else if (B == 2) {
      QUERIES(2, 4);
    } else {
      QUERIES(1, 4);
    }
#undef QUERIES
#undef QUERIES_OF
  }
#undef PLACE
#undef TOKEN
}

/* Floats that `attend` needs for queries of so many tokens of a sequence, a multiple of 16. */
static int64_t NAME(attention_room)(const struct layer *l, int64_t tokens) {
  const int64_t E = (l->head_size + LANES - 1) / LANES * LANES, few = MOST * (E + ROW);
  return tokens * (l->heads / l->kv_heads) > WIDTH ? few + NAME(tiles_room)(E) : few;
}

/* Tokens that one task has, of one head of keys: of many as many as fill its tiles, of few those whose queries fill the
   registers. Less where threads would have nothing to do. */
static int64_t NAME(task_tokens)(const struct layer *l, const struct block *b) {
  const int64_t group = l->heads / l->kv_heads, V = l->kv_heads;
  int64_t size = group < MOST ? MOST / group : 1;
  if (b->tokens == 1) return 1;
  if (b->tokens * group > WIDTH) {
    size = group < TASK_QUERIES ? TASK_QUERIES / group : 1;
    while (size * group > TILE && (b->rows + size - 1) / size * V < 2 * b->threads) size /= 2;
  }
  return size;
}
#undef ROW
#undef ALL
