/* Decoder layers of several kinds: tokens get the bits that they get alone, and every level makes the same.

   Part of check.c, which includes it: compiled with the products, since that takes longest. */

#define TOKENS 21
/* Of a longer prompt, whose keys go over the borders of several blocks; and where its first one is in its sequence. */
#define MANY (2 * KEY_BLOCK + 44)
#define POSITION (KEY_BLOCK - 28)

/* In [-1, 1), and so few bits that a multiple of it plus something is not rounded, here and there otherwise. */
static float draw_coarse(void) { return (float)((int32_t)draw() >> 20) * 0x1p-11f; }

static float *draw_all(int64_t count, float about) {
  float *all = get(count, 4);
  for (int64_t i = 0; i < count; i++) all[i] = about + draw_coarse();
  return all;
}

/* The same in the type of hidden states. */
static void *draw_typed(int64_t count, int type) {
  float *all = draw_all(count, 0);
  if (type == NG_FLOAT32) return all;
  uint16_t *half = get(count, 2);
  for (int64_t i = 0; i < count; i++) half[i] = type == NG_BFLOAT16 ? to_bf16(all[i]) : to_f16(all[i]);
  free(all);
  return half;
}

static struct matrix *draw_matrix(int64_t outputs, int64_t inputs, int kind) {
  struct matrix *m = calloc(1, sizeof *m);
  const int64_t K = (inputs + G - 1) / G * G, P = (outputs + LANES - 1) / LANES * LANES;
  if (!m) abort();
  *m = (struct matrix){.outputs = outputs, .inputs = inputs, .padded_inputs = K, .scale_groups = 1, .kind = kind,
                       .scale_type = NG_FLOAT16};
  if (kind == NG_BF16) {
    uint16_t *weights = get(outputs * inputs, 2);
    for (int64_t i = 0; i < outputs * inputs; i++) weights[i] = to_bf16(draw_coarse() * 0.25f);
    m->weights = weights;
  } else {
    uint8_t *weights = get(P * K, 1);
    uint16_t *scales = get(P * K / G, 2);
    for (int64_t i = 0; i < P * K; i++) weights[i] = (uint8_t)draw() | 1;
    for (int64_t i = 0; i < P * K / G; i++) scales[i] = to_f16(0x1p-9f + 0x1p-10f * draw_coarse());
    m->weights = weights;
    m->scales = scales;
  }
  if (outputs % 3) m->bias = draw_all(outputs, 0);
  return m;
}

static void drop(const struct matrix *m) {
  if (!m) return;
  free((void *)m->weights);
  free((void *)m->scales);
  free((void *)m->bias);
  free((void *)m);
}

/* What tells one case from another. */
struct shape {
  int heads, kv_heads, head_size, rotary, intermediate, window, is_one, has_norms;
  float softcap;
  int has_holes;
};

/* Bytes from one key to the next. */
static int64_t key_bytes(const struct layer *l) {
  const int64_t E = l->head_size;
  return l->is_coded ? E + (E + G - 1) / G * 2 : E * (l->type == NG_FLOAT32 ? 4 : 2);
}

/* What leaves the layer for tokens [first, first + count) of `tokens`, whose keys and values are known up to there; of
   a window those that it has dropped are not given. */
static void *leave(const struct layer *l, const struct shape *s, const void *hidden, const float *queries,
                   const void *keys, const void *values, int64_t tokens, int64_t first, int64_t count, int threads) {
  const int64_t dropped = s->window && first >= s->window ? first - s->window + 1 : 0, N = first + count - dropped;
  const int64_t D = l->hidden, E = l->head_size, bytes = l->type == NG_FLOAT32 ? 4 : 2;
  const int64_t each = l->is_coded ? key_bytes(l) : E, skipped = dropped * each * (l->is_coded ? 1 : bytes);
  const struct states k = {(const char *)keys + skipped, 0, tokens * each, each};
  const struct first_key first_key = {POSITION + dropped, 0};
  const struct states v = {(const char *)values + skipped, 0, tokens * each, each};
  char *result = get(count * D * bytes, 1), *normed = l->down ? NULL : get(count * D * bytes, 1);
  uint8_t *mask = s->window ? get(count, (size_t)N) : NULL;
  for (int64_t t = 0; t < count && mask; t++)
    for (int64_t n = 0; n < N; n++) {
      const int64_t behind = first + t - dropped - n; /* of some shapes each third one of the keys before is not seen */
      mask[t * N + n] = behind >= 0 && behind < s->window && !(s->has_holes && behind && (dropped + n) % 3 == 0);
    }
  float *its = get(count * l->heads * E, 4);
  memcpy(its, queries + first * l->heads * E, (size_t)(count * l->heads * E) * 4);
  if (ng_finish_layer(l, level, (const char *)hidden + first * D * bytes, 1, count, its, &k, &v, N, &first_key, mask,
                      result, normed, NULL, threads))
    abort();
  if (normed) { /* both, for the hash */
    result = realloc(result, (size_t)(2 * count * D * bytes));
    memcpy(result + count * D * bytes, normed, (size_t)(count * D * bytes));
  }
  free(its);
  free(mask);
  free(normed);
  return result;
}

/* What leaves the layer for the last token, whose window is a ring: keys begin somewhere in it. */
static void *leave_ring(const struct layer *l, const struct shape *s, const char *hidden, const float *queries,
                        const char *keys, const char *values, int64_t tokens) {
  const int64_t N = s->window, V = l->kv_heads, D = l->hidden, Q = l->heads * l->head_size, one = key_bytes(l);
  const int64_t bytes = l->type == NG_FLOAT32 ? 4 : 2, each = l->is_coded ? one : l->head_size;
  const struct first_key first_key = {POSITION + tokens - N, N / 3 + 1};
  char *ring_keys = get(V * N * one, 1), *ring_values = get(V * N * one, 1), *result = get(D * bytes, 1);
  char *normed = l->down ? NULL : get(D * bytes, 1);
  uint8_t *mask = get(N, 1);
  for (int64_t n = 0; n < N; n++) {
    const int64_t place = (first_key.place + n) % N, token = tokens - N + n;
    mask[place] = !(s->has_holes && n < N - 1 && token % 3 == 0);
    for (int64_t v = 0; v < V; v++) {
      memcpy(ring_keys + (v * N + place) * one, keys + (v * tokens + token) * one, (size_t)one);
      memcpy(ring_values + (v * N + place) * one, values + (v * tokens + token) * one, (size_t)one);
    }
  }
  const struct states k = {ring_keys, 0, N * each, each}, v = {ring_values, 0, N * each, each};
  if (ng_finish_layer(l, level, hidden + (tokens - 1) * D * bytes, 1, 1, queries + (tokens - 1) * Q, &k, &v, N,
                      &first_key, mask, result, normed, NULL, 1))
    abort();
  free(ring_keys);
  free(ring_values);
  free(normed);
  free(mask);
  return result;
}

/* The whole prompt; its tokens alone or, of a long one, pieces of 1, 2, 7, 64 and the rest; and what is behind those. */
static void check_layer(const struct shape *s, int kind, int type, int is_coded, int64_t tokens) {
  const int64_t D = 40, E = s->head_size, Q = s->heads * E, K = s->kv_heads * E, I = s->intermediate;
  const int64_t bytes = type == NG_FLOAT32 ? 4 : 2, sizes[] = {D, E, E, D, D, D};
  struct layer l = {.output = draw_matrix(D, Q, kind), .hidden = D, .heads = s->heads, .kv_heads = s->kv_heads,
                    .head_size = E, .rotary = s->rotary, .intermediate = I, .scaling = 0.3f, .softcap = s->softcap,
                    .activation = s->is_one ? NG_SILU : NG_GELU_TANH, .type = type, .is_coded = is_coded};
  if (s->is_one) {
    l.projections[0] = draw_matrix(Q + 2 * K, D, kind);
    if (I) l.gate_up[0] = draw_matrix(2 * I, D, kind);
  } else {
    for (int i = 0; i < 3; i++) l.projections[i] = draw_matrix(i ? K : Q, D, kind);
    for (int i = 0; i < 2 && I; i++) l.gate_up[i] = draw_matrix(I, D, kind);
  }
  if (I) l.down = draw_matrix(D, I, kind);
  for (int i = 0; i < NG_NORMS; i++)
    if (s->has_norms || i == NG_BEFORE_ATTENTION || i == NG_BEFORE_MLP) {
      l.norms[i] = draw_all(sizes[i], 1);
      l.norm_sizes[i] = sizes[i];
      l.eps[i] = 1e-6f;
    }
  char *hidden = draw_typed(tokens * D, type), *cosines = draw_typed(tokens * s->rotary, type);
  const int64_t one = key_bytes(&l), of_token = s->kv_heads * one;
  char *sines = draw_typed(tokens * s->rotary, type), *keys = get(tokens * of_token, 1), *values = get(tokens * of_token, 1);
  float *queries = get(tokens * Q, 4), *query = get(Q, 4);
  char *key = get(of_token, 1), *value = get(of_token, 1);
  if (ng_project_layer(&l, level, hidden, 1, tokens, cosines, sines, 1, queries, keys, values, NULL, 2)) abort();
  char *all = leave(&l, s, hidden, queries, keys, values, tokens, 0, tokens, 2);
  static const int64_t sizes_of_pieces[] = {1, 2, 7, 64, MANY};
  for (int64_t t = 0, size, i = 0; t < tokens; t += size, i++) {
    const int64_t angle = t * s->rotary * bytes;
    size = tokens == TOKENS ? 1 : sizes_of_pieces[i] < tokens - t ? sizes_of_pieces[i] : tokens - t;
    if (ng_project_layer(&l, level, hidden + t * D * bytes, 1, 1, cosines + angle, sines + angle, 1, query, key,
                           value, NULL, 1))
      abort();
    int same = !memcmp(query, queries + t * Q, (size_t)Q * 4);
    for (int64_t v = 0; v < s->kv_heads; v++)
      same &= !memcmp(key + v * one, keys + (v * tokens + t) * one, (size_t)one) &&
              !memcmp(value + v * one, values + (v * tokens + t) * one, (size_t)one);
    char *alone = leave(&l, s, hidden, queries, keys, values, tokens, t, size, 1);
    if (!same || memcmp(alone, all + t * D * bytes, (size_t)(size * D * bytes))) {
      fprintf(stderr, "level %d, %s: token %d is not what it is alone\n", level, name, (int)t);
      exit(1);
    }
    free(alone);
  }
  const int64_t rest = tokens == TOKENS ? 5 : tokens - 40;
  char *later = leave(&l, s, hidden, queries, keys, values, tokens, rest, tokens - rest, 2);
  if (memcmp(later, all + rest * D * bytes, (size_t)((tokens - rest) * D * bytes))) {
    fprintf(stderr, "level %d, %s: a piece of a prompt is not what it is in the whole\n", level, name);
    exit(1);
  }
  if (s->window && tokens > s->window) {
    char *ring = leave_ring(&l, s, hidden, queries, keys, values, tokens);
    if (memcmp(ring, all + (tokens - 1) * D * bytes, (size_t)(D * bytes))) {
      fprintf(stderr, "level %d, %s: the last token is another where its keys are a ring\n", level, name);
      exit(1);
    }
    free(ring);
  }
  uint64_t hash = 0xcbf29ce484222325u;
  for (int64_t i = 0; i < tokens * D * bytes * (I ? 1 : 2); i++) hash = (hash ^ (uint8_t)all[i]) * 0x100000001b3u;
  printf("%s: %016llx\n", name, (unsigned long long)hash);
  void *mine[] = {hidden, cosines, sines, keys, values, queries, query, key, value, all, later};
  for (size_t i = 0; i < sizeof mine / sizeof *mine; i++) free(mine[i]);
  for (int i = 0; i < NG_NORMS; i++) free((void *)l.norms[i]);
  for (int i = 0; i < 3; i++) drop(l.projections[i]);
  for (int i = 0; i < 2; i++) drop(l.gate_up[i]);
  drop(l.output);
  drop(l.down);
}

static void check_layers(void) {
  static const struct shape shapes[] = {
      {4, 2, 16, 16, 48, 0, 0, 0, 0, 0}, {4, 1, 24, 8, 40, 0, 1, 0, 0, 0},  {3, 3, 64, 64, 33, 0, 0, 1, 0, 0},
      {8, 1, 32, 32, 64, 5, 1, 1, 2, 0}, {2, 2, 7, 6, 0, 3, 0, 0, 0.5f, 0}, {12, 2, 16, 0, 0, 0, 1, 1, 0, 0},
      {5, 1, 128, 128, 50, 0, 0, 1, 30, 0},
  };
  static const struct shape many[] = {
      {4, 2, 64, 16, 16, 0, 0, 0, 0, 0}, {3, 3, 24, 8, 0, 0, 1, 0, 5, 0},
      {2, 1, 16, 16, 0, 50, 0, 1, 0, 0}, {8, 1, 20, 8, 0, KEY_BLOCK + 9, 1, 1, 2, 1},
  };
  static const int kinds[] = {NG_BF16, NG_CODES8, NG_CODES8_INT8};
  for (int is_coded = 0; is_coded < 2; is_coded++)
    for (int type = NG_FLOAT32; type <= NG_FLOAT16; type++)
      for (int kind = 0; kind < (is_coded ? 1 : 3); kind++)
        for (size_t i = 0; i < sizeof shapes / sizeof *shapes; i++) {
          state = 0x9e3779b97f4a7c15u + (uint64_t)kinds[kind]; /* the same on every level */
          snprintf(name, sizeof name, "shape %d, kind %d, type %d%s", (int)i, kinds[kind], type, is_coded ? ", coded" : "");
          check_layer(shapes + i, kinds[kind], type, is_coded, TOKENS);
        }
  for (int is_coded = 0; is_coded < 2; is_coded++)
    for (int type = NG_FLOAT32; type <= NG_BFLOAT16; type++)
      for (size_t i = 0; i < sizeof many / sizeof *many; i++) {
        state = 0x9e3779b97f4a7c15u;
        snprintf(name, sizeof name, "many tokens, shape %d, type %d%s", (int)i, type, is_coded ? ", coded" : "");
        check_layer(many + i, NG_BF16, type, is_coded, MANY);
      }
}
