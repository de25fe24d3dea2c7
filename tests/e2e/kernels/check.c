/* Products of every kind, compared with sums of doubles over the weights that a matrix stands for; and layers.

   check LEVEL prints one line for each case, its name and a hash of the result: where every level and processor makes
   the same bits, all print the same. It ends with 1 and a sentence at the first result that is wrong, and with 77 where
   the processor lacks the level. Buffers have exactly the size that the layout asks for, so that a sanitizer sees
   what is read beyond them. NaNs count as equal: processors choose their bits and signs differently. */

#include "kernels.c"

#include <stdarg.h>
#include <stdio.h>

#define TOLERANCE 1e-6 /* of the sum of magnitudes */
#define MOST_ROWS 13

static const int64_t batches[] = {1, 2, 3, 7, 8, MOST_ROWS};
static const char *const kind_names[] = {"bf16",   "bf16-dot",    "codes8",     "codes8_int8",
                                         "codes4", "codes4_int8", "codes8_half"};
static const char *const type_names[] = {"f32", "bf16", "f16"};

static int level;
static char name[200]; /* of the case */

__attribute__((format(printf, 1, 2), noreturn)) static void fail(const char *format, ...) {
  va_list rest;
  va_start(rest, format);
  fprintf(stderr, "level %d, %s: ", level, name);
  vfprintf(stderr, format, rest);
  fprintf(stderr, "\n");
  exit(1);
}

static void *get(int64_t count, size_t size) {
  void *memory = malloc((size_t)count * size);
  if (!memory) fail("there is no memory");
  return memory;
}

/* ---------------------------------------------------------------------------------------------- numbers */

static uint64_t state;

static uint32_t draw(void) { /* xorshift64 */
  state ^= state << 13;
  state ^= state >> 7;
  state ^= state << 17;
  return (uint32_t)(state >> 32);
}

static float draw_signed(void) { /* in (-1, 1), never zero, with all 24 bits */
  int32_t value = (int32_t)(draw() >> 8 | 1);
  return (float)(draw() & 1 ? value : -value) * 0x1p-24f;
}

/* Half floats by their definition. The pattern of infinity has the value at which a number is rounded to it. */
static double grid[3][65536];

static int infinity_bits(int type) { return type == NG_BFLOAT16 ? 0x7f80 : 0x7c00; }

static void make_grids(void) {
  for (int type = NG_BFLOAT16; type <= NG_FLOAT16; type++) {
    int mantissa_bits = type == NG_BFLOAT16 ? 7 : 10, bias = type == NG_BFLOAT16 ? 127 : 15;
    for (int bits = 0; bits < 65536; bits++) {
      int exponent = (bits & 0x7fff) >> mantissa_bits, mantissa = bits & ((1 << mantissa_bits) - 1);
      if (exponent) mantissa += 1 << mantissa_bits;
      else exponent = 1;
      double value = ldexp(mantissa, exponent - bias - mantissa_bits);
      grid[type][bits] = bits & 0x8000 ? -value : value;
    }
  }
}

static float decode(int type, int bits) {
  int rest = bits & 0x7fff;
  if (rest > infinity_bits(type)) return NAN;
  if (rest == infinity_bits(type)) return bits & 0x8000 ? -INFINITY : INFINITY;
  return (float)grid[type][bits];
}

/* The nearest of all, and of two the even one. */
static uint16_t encode(int type, float value) {
  int low = 0, high = infinity_bits(type), sign = signbit(value) ? 0x8000 : 0;
  double magnitude = fabs((double)value);
  if (isnan(value)) return (uint16_t)(high | 1 << (type == NG_BFLOAT16 ? 6 : 9));
  if (magnitude >= grid[type][high]) return (uint16_t)(sign | high);
  while (high - low > 1) {
    int middle = (low + high) / 2;
    if (grid[type][middle] <= magnitude) low = middle;
    else high = middle;
  }
  double below = magnitude - grid[type][low], above = grid[type][high] - magnitude;
  return (uint16_t)(sign | (below < above || (below == above && low % 2 == 0) ? low : high));
}

static size_t size_of(int type) { return type == NG_FLOAT32 ? 4 : 2; }

static float number_at(const void *numbers, int type, int64_t at) {
  return type == NG_FLOAT32 ? ((const float *)numbers)[at] : decode(type, ((const uint16_t *)numbers)[at]);
}

static void store(void *numbers, int type, int64_t at, float value) {
  if (type == NG_FLOAT32) ((float *)numbers)[at] = value;
  else ((uint16_t *)numbers)[at] = encode(type, value);
}

/* All of a float array as another type, in memory of its own. */
static void *converted(const float *from, int64_t count, int type) {
  void *to = get(count, size_of(type));
  for (int64_t i = 0; i < count; i++) store(to, type, i, from[i]);
  return to;
}

/* FNV-1a. */
static void print_hash(const void *bytes, size_t size) {
  uint64_t hash = 0xcbf29ce484222325u;
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3u;
  printf("%s: %016llx\n", name, (unsigned long long)hash);
}

/* ---------------------------------------------------------------------------------------------- matrices */

static int is_codes(int kind) { return kind >= NG_CODES8; }
static int is_half(int kind) { return kind == NG_CODES8_HALF; }
static int is_8_bits(int kind) { return kind == NG_CODES8 || kind == NG_CODES8_INT8 || is_half(kind); }
static int is_int8(int kind) { return kind == NG_CODES8_INT8 || kind == NG_CODES4_INT8; }

/* A matrix as the products read it, and what it stands for: value * scale + minimum. Where there are two scales to a
   group, the values have them. */
struct example {
  struct matrix m;
  float table[16];
  double *values;             /* [O][K] */
  double *scales, *minimums; /* [O][N] */
};

static int64_t blocks_of(const struct matrix *m) { return (m->outputs + LANES - 1) / LANES; }

static int64_t scales_of(const struct matrix *m) {
  return is_half(m->kind) ? m->padded_inputs / (G / 2) : m->padded_inputs / G / m->scale_groups;
}

static void set_scale(const struct matrix *m, const void *scales, int64_t output, int64_t group, float value) {
  int64_t at = (output / LANES * scales_of(m) + group) * LANES + output % LANES;
  store((void *)(uintptr_t)scales, m->scale_type, at, value);
}

static void set_code(const struct example *e, int64_t output, int64_t input, int code) {
  const struct matrix *m = &e->m;
  int per = is_8_bits(m->kind) ? 4 : 8; /* inputs of a lane's four bytes */
  int64_t at = ((output / LANES * (m->padded_inputs / per) + input / per) * LANES + output % LANES) * 4 + input % 4;
  uint8_t *byte = (uint8_t *)(uintptr_t)m->weights + at;
  if (per == 4) *byte = (uint8_t)(code + 128);
  else if (input % 8 < 4) *byte = (uint8_t)((*byte & 0xf0) | code);
  else *byte = (uint8_t)((*byte & 0x0f) | code << 4);
  if (output < m->outputs) {
    double value = per == 4 ? code : m->kind == NG_CODES4 ? e->table[code] : code - 8;
    e->values[output * m->padded_inputs + input] = value;
  }
}

static void set_bf16(const struct example *e, int64_t output, int64_t input, float value) {
  uint16_t bits = encode(NG_BFLOAT16, value);
  ((uint16_t *)(uintptr_t)e->m.weights)[output * e->m.inputs + input] = bits;
  e->values[output * e->m.padded_inputs + input] = grid[NG_BFLOAT16][bits];
}

/* No weight of it is zero. What stands where there is no output is NaN. */
static struct example make(int kind, int64_t outputs, int64_t inputs, int scale_type, int64_t scale_groups,
                           int has_minimums, int has_bias) {
  struct example e = {.m = {.outputs = outputs,
                            .inputs = inputs,
                            .scale_groups = scale_groups,
                            .kind = kind,
                            .scale_type = scale_type}};
  struct matrix *m = &e.m;
  int64_t unit = G * scale_groups, K = m->padded_inputs = (inputs + unit - 1) / unit * unit, N = K / G;
  e.values = get(outputs * K, sizeof(double));
  e.scales = get(outputs * N, sizeof(double));
  e.minimums = get(outputs * N, sizeof(double));
  for (int64_t i = 0; i < outputs * K; i++) e.values[i] = 0;
  for (int64_t i = 0; i < outputs * N; i++) e.scales[i] = 1, e.minimums[i] = 0;
  if (has_bias) {
    float *bias = get(outputs, sizeof(float));
    for (int64_t o = 0; o < outputs; o++) bias[o] = draw_signed();
    m->bias = bias;
  }
  if (!is_codes(kind)) {
    m->weights = get(outputs * inputs, 2);
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t i = 0; i < inputs; i++) set_bf16(&e, o, i, draw_signed());
    return e;
  }
  int64_t lanes = blocks_of(m) * LANES, num_scales = scales_of(m);
  m->weights = get(lanes * K / (is_8_bits(kind) ? 1 : 2), 1);
  m->scales = get(lanes * num_scales, size_of(scale_type));
  if (has_minimums) m->minimums = get(lanes * num_scales, size_of(scale_type));
  for (int i = 0; i < 16; i++) e.table[i] = draw_signed();
  for (int64_t o = 0; o < lanes; o++) {
    for (int64_t k = 0; k < K; k++) {
      int code = is_8_bits(kind) ? (int)(draw() % 256) - 128 : (int)(draw() % 16);
      if (code == (is_8_bits(kind) ? 0 : 8)) code++;
      set_code(&e, o, k, code);
    }
    for (int64_t n = 0; n < num_scales; n++) {
      set_scale(m, m->scales, o, n, o < outputs ? draw_signed() * 0.0625f : NAN);
      if (has_minimums) set_scale(m, m->minimums, o, n, o < outputs ? draw_signed() : NAN);
    }
  }
  if (is_half(kind)) {
    for (int64_t o = 0; o < outputs; o++)
      for (int64_t k = 0; k < K; k++) {
        int64_t at = (o / LANES * num_scales + k / (G / 2)) * LANES + o % LANES;
        e.values[o * K + k] *= (double)number_at(m->scales, scale_type, at);
      }
    return e;
  }
  for (int64_t o = 0; o < outputs; o++)
    for (int64_t n = 0; n < N; n++) {
      int64_t at = (o / LANES * num_scales + n / scale_groups) * LANES + o % LANES;
      e.scales[o * N + n] = (double)number_at(m->scales, scale_type, at);
      if (has_minimums) e.minimums[o * N + n] = (double)number_at(m->minimums, scale_type, at);
    }
  return e;
}

static void release(struct example *e) {
  const void *const all[] = {e->m.weights, e->m.scales, e->m.minimums, e->m.bias, e->values, e->scales, e->minimums};
  for (size_t i = 0; i < sizeof all / sizeof *all; i++) free((void *)(uintptr_t)all[i]);
}

/* ---------------------------------------------------------------------------------------------- products */

/* The product, in memory of its own, with one pattern for all NaNs. What is not written is NaN. */
static void *multiply(struct example *e, const void *x, int x_type, int y_type, int64_t rows, int threads) {
  int64_t count = rows * e->m.outputs;
  void *y = get(count, size_of(y_type));
  memset(y, 0xff, (size_t)count * size_of(y_type));
  e->m.table = e->m.kind == NG_CODES4 ? e->table : NULL;
  int error = ng_multiply(&e->m, level, x, x_type, y, y_type, rows, threads);
  if (error) fail("ng_multiply answers %d for %d rows", error, (int)rows);
  for (int64_t i = 0; i < count; i++)
    if (isnan(number_at(y, y_type, i))) store(y, y_type, i, NAN);
  return y;
}

static void expect_same(const void *got, const void *wanted, int64_t count, int type, const char *what) {
  for (int64_t i = 0; i < count; i++)
    if (memcmp((const char *)got + (size_t)i * size_of(type), (const char *)wanted + (size_t)i * size_of(type),
               size_of(type)))
      fail("number %d of %s is %a, not %a", (int)i, what, (double)number_at(got, type, i),
           (double)number_at(wanted, type, i));
}

/* Codes of 8 bits as the products make them: the exact product with 127 / most, rounded to the nearest even integer. */
static void quantize_group(double *x, double *scale) {
  float most = 0;
  for (int i = 0; i < G; i++) most = fabs(x[i]) > (double)most ? (float)fabs(x[i]) : most;
  float inverse = most > 0 ? 127.f / most : 0;
  if (isinf(inverse)) inverse = 0;
  for (int i = 0; i < G; i++) x[i] = nearbyint(x[i] * (double)inverse);
  *scale = (double)(most / 127.f);
}

/* One row of sums of doubles, compared. What is below the smallest floats is lost with each sum, and no error. */
static void expect_near(const struct example *e, const float *x, const float *y, const char *what) {
  const struct matrix *m = &e->m;
  int64_t K = m->padded_inputs, N = K / G;
  double *by = get(K, sizeof(double)), *scales = get(N, sizeof(double));
  double *sums = get(N, sizeof(double)), *magnitudes = get(N, sizeof(double));
  for (int64_t k = 0; k < K; k++) by[k] = k < m->inputs ? (double)x[k] : 0;
  for (int64_t n = 0; n < N; n++) {
    scales[n] = 1;
    sums[n] = magnitudes[n] = 0;
    for (int64_t k = n * G; k < (n + 1) * G; k++) sums[n] += by[k], magnitudes[n] += fabs(by[k]);
    if (is_int8(m->kind)) quantize_group(by + n * G, &scales[n]);
  }
  for (int64_t o = 0; o < m->outputs; o++) {
    double sum = m->bias ? (double)m->bias[o] : 0, magnitude = fabs(sum);
    for (int64_t n = 0; n < N; n++) {
      double scale = e->scales[o * N + n] * scales[n], minimum = e->minimums[o * N + n], part = 0, size = 0;
      for (int64_t k = n * G; k < (n + 1) * G; k++) {
        double one = e->values[o * K + k] * by[k];
        part += one;
        size += fabs(one);
      }
      sum += scale * part + minimum * sums[n];
      magnitude += fabs(scale) * size + fabs(minimum) * magnitudes[n];
    }
    if (!(fabs((double)y[o] - sum) <= TOLERANCE * magnitude + (double)(K + N + 8) * 0x1p-149))
      fail("output %d of %s is %.9g, and the sum of doubles %.9g", (int)o, what, (double)y[o], sum);
  }
  free(by), free(scales), free(sums), free(magnitudes);
}

/* Rows one at a time, each near to sums of doubles unless `is_special`; in batches and threads they get the same. */
static float *check_rows(struct example *e, const float *x, int64_t rows, int is_special) {
  const struct matrix *m = &e->m;
  int64_t O = m->outputs, I = m->inputs;
  int x_type = m->kind == NG_BF16_DOT ? NG_BFLOAT16 : NG_FLOAT32;
  char *typed = converted(x, rows * I, x_type);
  float *alone = get(rows * O, sizeof(float));
  for (int64_t r = 0; r < rows; r++) {
    void *row = get(I, size_of(x_type)); /* its own, that nothing beyond it is read */
    memcpy(row, typed + (size_t)(r * I) * size_of(x_type), (size_t)I * size_of(x_type));
    float *y = multiply(e, row, x_type, NG_FLOAT32, 1, 1), *wide = get(I, sizeof(float));
    for (int64_t i = 0; i < I; i++) wide[i] = number_at(row, x_type, i);
    if (!is_special) expect_near(e, wide, y, "a row");
    memcpy(alone + r * O, y, (size_t)O * sizeof(float));
    free(row), free(y), free(wide);
  }
  for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) {
    int64_t batch = batches[b];
    if (batch > rows) break;
    float *y = multiply(e, typed, x_type, NG_FLOAT32, batch, 1);
    expect_same(y, alone, batch * O, NG_FLOAT32, "a batch, compared with rows alone,");
    free(y);
  }
  float *y = multiply(e, typed, x_type, NG_FLOAT32, rows, 3);
  expect_same(y, alone, rows * O, NG_FLOAT32, "the product of three threads");
  free(y), free(typed);
  return alone;
}

/* The result as each type is the result rounded to it. */
static void check_result_types(struct example *e, const float *x, int64_t rows, const float *wanted) {
  int x_type = e->m.kind == NG_BF16_DOT ? NG_BFLOAT16 : NG_FLOAT32;
  void *typed = converted(x, rows * e->m.inputs, x_type);
  for (int type = NG_BFLOAT16; type <= NG_FLOAT16; type++) {
    void *y = multiply(e, typed, x_type, type, rows, 1), *rounded = converted(wanted, rows * e->m.outputs, type);
    expect_same(y, rounded, rows * e->m.outputs, type, type == NG_BFLOAT16 ? "the bf16 result" : "the f16 result");
    free(y), free(rounded);
  }
  free(typed);
}

/* Activations of each type give what the same numbers give as float. */
static void check_activation_types(struct example *e, const float *x, int64_t rows) {
  int64_t count = rows * e->m.inputs;
  for (int type = NG_BFLOAT16; type <= NG_FLOAT16 && e->m.kind != NG_BF16_DOT; type++) {
    void *typed = converted(x, count, type);
    float *wide = get(count, sizeof(float));
    for (int64_t i = 0; i < count; i++) wide[i] = number_at(typed, type, i);
    float *y = multiply(e, typed, type, NG_FLOAT32, rows, 1);
    float *wanted = multiply(e, wide, NG_FLOAT32, NG_FLOAT32, rows, 1);
    expect_same(y, wanted, rows * e->m.outputs, NG_FLOAT32, "the product of half floats");
    free(typed), free(wide), free(y), free(wanted);
  }
}

/* ---------------------------------------------------------------------------------------------- cases */

static void begin(const struct example *e, const char *what) {
  const struct matrix *m = &e->m;
  int length = snprintf(name, sizeof name, "%s %dx%d", kind_names[m->kind], (int)m->outputs, (int)m->inputs);
  if (is_codes(m->kind))
    length += snprintf(name + length, sizeof name - (size_t)length, " scales %s/%d%s", type_names[m->scale_type],
                       (int)m->scale_groups, m->minimums ? " minimums" : "");
  snprintf(name + length, sizeof name - (size_t)length, "%s%s", m->bias ? " bias" : "", what);
}

static void check_ordinary(int kind, int64_t outputs, int64_t inputs, int scale_type, int64_t scale_groups,
                           int has_minimums, int has_bias) {
  struct example e = make(kind, outputs, inputs, scale_type, scale_groups, has_minimums, has_bias);
  float *x = get(MOST_ROWS * inputs, sizeof(float));
  begin(&e, "");
  for (int64_t i = 0; i < MOST_ROWS * inputs; i++) x[i] = draw_signed() * 4;
  float *y = check_rows(&e, x, MOST_ROWS, 0);
  check_result_types(&e, x, MOST_ROWS, y);
  check_activation_types(&e, x, MOST_ROWS);
  size_t length = strlen(name);
  for (size_t b = 0; b < sizeof batches / sizeof *batches; b++) { /* of which each is equal to the first rows */
    snprintf(name + length, sizeof name - length, " rows %d", (int)batches[b]);
    print_hash(y, (size_t)(batches[b] * outputs) * sizeof(float));
  }
  free(x), free(y);
  release(&e);
}

enum special {
  ORDINARY,
  HAS_NAN,
  HAS_INFINITY,
  HAS_MINUS_INFINITY,
  HAS_BOTH,
  ZEROS,
  MINUS_ZEROS,
  DENORMALS,
  HUGE_ONES
};

/* Rows whose products are not finite are not, wherever the number stands; the rows beside them are as always. */
static void check_special(int kind, int has_minimums, int has_bias) {
  const int64_t outputs = 37, inputs = 72, at[] = {0, 31, 45, 71};
  struct example e = make(kind, outputs, inputs, NG_FLOAT16, 1, has_minimums, has_bias);
  float x[MOST_ROWS * 72];
  begin(&e, " special");
  size_t length = strlen(name);
  for (int i = 0; i < 4; i++) {
    static const int specials[MOST_ROWS] = {ORDINARY, HAS_NAN,     HAS_INFINITY, HAS_MINUS_INFINITY, HAS_BOTH,
                                            ZEROS,    MINUS_ZEROS, DENORMALS,    HUGE_ONES,          ORDINARY,
                                            HAS_NAN,  ZEROS,       ORDINARY};
    snprintf(name + length, sizeof name - length, " at %d", (int)at[i]);
    for (int r = 0; r < MOST_ROWS; r++) {
      float *row = x + r * inputs;
      for (int64_t k = 0; k < inputs; k++) {
        if (specials[r] == ZEROS) row[k] = 0;
        else if (specials[r] == MINUS_ZEROS) row[k] = -0.f;
        else if (specials[r] == DENORMALS) row[k] = draw_signed() * 0x1p-126f;
        else if (specials[r] == HUGE_ONES) row[k] = draw_signed() * 0x1p110f;
        else row[k] = draw_signed();
      }
      if (specials[r] == HAS_NAN) row[at[i]] = NAN;
      if (specials[r] == HAS_INFINITY || specials[r] == HAS_BOTH) row[at[i]] = INFINITY;
      if (specials[r] == HAS_MINUS_INFINITY) row[at[i]] = -INFINITY;
      if (specials[r] == HAS_BOTH) row[(at[i] + 16) % inputs] = NAN;
    }
    float *all = check_rows(&e, x, MOST_ROWS, 1);
    for (int r = 0; r < MOST_ROWS; r++) {
      const float *y = all + r * outputs;
      int special = specials[r];
      for (int64_t o = 0; o < outputs; o++) {
        float bias = e.m.bias ? e.m.bias[o] : 0;
        double weight = e.values[o * e.m.padded_inputs + at[i]] * e.scales[o * (e.m.padded_inputs / G) + at[i] / G];
        if ((special == HAS_NAN || special == HAS_BOTH) && !isnan(y[o])) fail("a row with NaN gives %g", (double)y[o]);
        if (special == HAS_INFINITY || special == HAS_MINUS_INFINITY) {
          if (isfinite(y[o])) fail("a row with infinity gives %g", (double)y[o]);
          /* Codes have lost its sign, and with a minimum it may be infinity less infinity. */
          float wanted = x[r * inputs + at[i]] * (weight > 0 ? 1.f : -1.f);
          if (!has_minimums && (is_int8(kind) ? !isinf(y[o]) : y[o] != wanted))
            fail("infinity times %g gives %g", weight, (double)y[o]);
        }
        if ((special == ZEROS || special == MINUS_ZEROS) && y[o] != bias) fail("zeros give %g", (double)y[o]);
      }
      /* bf16-dot takes denormals as zeros. */
      if (special == ORDINARY || special == HUGE_ONES || (special == DENORMALS && kind != NG_BF16_DOT)) {
        float row[72];
        memcpy(row, x + r * inputs, sizeof row);
        if (kind == NG_BF16_DOT)
          for (int64_t k = 0; k < inputs; k++) row[k] = decode(NG_BFLOAT16, encode(NG_BFLOAT16, row[k]));
        expect_near(&e, row, y, special == ORDINARY ? "a row" : special == DENORMALS ? "denormals" : "huge numbers");
      }
    }
    check_result_types(&e, x, MOST_ROWS, all);
    check_activation_types(&e, x, MOST_ROWS);
    print_hash(all, sizeof(float) * (size_t)(MOST_ROWS * outputs));
    free(all);
  }
  release(&e);
}

/* Activations whose product with 127 / most is rounded to a half, but is none: to round twice would be seen. */
static void check_quantizing(int kind) {
  const int64_t groups = 128, rows = 3, inputs = groups * G;
  struct example e = make(kind, 17, inputs, NG_FLOAT32, 1, 0, 0);
  float *x = get(rows * inputs, sizeof(float));
  int twice = 0;
  begin(&e, " halves");
  for (int64_t n = 0; n < rows * groups; n++) {
    float most = 1 + fabsf(draw_signed()), inverse = 127.f / most;
    for (int i = 0; i < G; i++) {
      float value = ((float)(draw() % 126) + 0.5f) / inverse;
      uint32_t turn = draw() % 3;
      if (turn) value = nextafterf(value, turn == 1 ? 0 : 2);
      volatile float product = value * inverse;
      twice += nearbyint((double)product) != nearbyint((double)value * (double)inverse);
      x[n * G + i] = draw() & 1 ? value : -value;
    }
    x[n * G + draw() % G] = most;
  }
  if (twice < 100) fail("only %d activations would show it", twice);
  float *y = check_rows(&e, x, rows, 0);
  print_hash(y, sizeof(float) * (size_t)(rows * 17));
  free(x), free(y);
  release(&e);
}

/* A matrix of the number 1 passes on what it gets. */
static struct example make_one(void) {
  struct example e = make(NG_BF16, 1, 1, NG_FLOAT32, 1, 0, 0);
  set_bf16(&e, 0, 0, 1);
  return e;
}

/* Every half float as activation, and the numbers between any two of them as result. */
static void check_conversions(int type) {
  struct example e = make_one();
  snprintf(name, sizeof name, "every %s", type_names[type]);
  uint16_t *every = get(65536, 2);
  float *wanted = get(65536, sizeof(float));
  for (int bits = 0; bits < 65536; bits++) {
    every[bits] = (uint16_t)bits;
    wanted[bits] = decode(type, bits) + 0.f; /* sums begin with 0, which adding -0 leaves positive */
    if (isnan(wanted[bits])) wanted[bits] = NAN;
  }
  float *y = multiply(&e, every, type, NG_FLOAT32, 65536, 1);
  expect_same(y, wanted, 65536, NG_FLOAT32, "the product of half floats");
  print_hash(y, 65536 * sizeof(float));
  free(every), free(wanted), free(y);

  snprintf(name, sizeof name, "every result of type %s", type_names[type]);
  int64_t count = 0;
  float *x = get(8 * 0x7f80 + 10, sizeof(float));
  for (int bits = 0; bits < infinity_bits(type); bits++) {
    float low = (float)grid[type][bits], middle = (float)((grid[type][bits] + grid[type][bits + 1]) / 2);
    const float near[] = {low, nextafterf(middle, 0), middle, nextafterf(middle, INFINITY)};
    for (int i = 0; i < 4; i++) x[count++] = near[i], x[count++] = -near[i];
  }
  float full_nan; /* to which nothing can be added without a carry into its sign */
  memset(&full_nan, 0xff, sizeof full_nan);
  const float beyond[] = {0x1p127f, 0x1.fffffep127f, INFINITY, NAN, full_nan};
  for (int i = 0; i < 5; i++) x[count++] = beyond[i], x[count++] = -beyond[i];
  y = multiply(&e, x, NG_FLOAT32, NG_FLOAT32, count, 1);
  for (int64_t i = 0; i < count; i++)
    if (!(y[i] == x[i] || (isnan(y[i]) && isnan(x[i])))) fail("%a became %a", (double)x[i], (double)y[i]);
  uint16_t *rounded = converted(y, count, type), *result = multiply(&e, x, NG_FLOAT32, type, count, 1);
  expect_same(result, rounded, count, type, "the rounded result");
  print_hash(result, (size_t)count * 2);
  free(x), free(y), free(rounded), free(result);
  release(&e);
}

/* Every half float as scale, denormals, infinities and NaNs included, and as minimum. */
static void check_scales(int type) {
  struct example e = make(NG_CODES8, 65536, 1, type, 1, 1, 0);
  float one = 1, *wanted = get(65536, sizeof(float));
  for (int is_minimum = 0; is_minimum < 2; is_minimum++) {
    snprintf(name, sizeof name, "every %s as %s", type_names[type], is_minimum ? "minimum" : "scale");
    const void *set = is_minimum ? e.m.minimums : e.m.scales, *other = is_minimum ? e.m.scales : e.m.minimums;
    for (int bits = 0; bits < 65536; bits++) {
      set_code(&e, bits, 0, 1);
      ((uint16_t *)(uintptr_t)set)[bits] = (uint16_t)bits; /* one group of inputs: block after block, as they count */
      ((uint16_t *)(uintptr_t)other)[bits] = 0;
      wanted[bits] = decode(type, bits) + 0.f;
      if (isnan(wanted[bits])) wanted[bits] = NAN;
    }
    float *y = multiply(&e, &one, NG_FLOAT32, NG_FLOAT32, 1, 1);
    expect_same(y, wanted, 65536, NG_FLOAT32, "the product with 1");
    print_hash(y, 65536 * sizeof(float));
    free(y);
  }
  free(wanted);
  release(&e);
}

/* A level without bf16-dot says so, and no level has it for floats. */
static void check_refusals(void) {
  struct example e = make(NG_BF16_DOT, 1, 32, NG_FLOAT32, 1, 0, 0);
  float x[32] = {0}, y;
  begin(&e, " refused");
  if (level < 2 && ng_multiply(&e.m, level, x, NG_BFLOAT16, &y, NG_FLOAT32, 1, 1) != 2) fail("it was not refused");
  if (ng_multiply(&e.m, level, x, NG_FLOAT32, &y, NG_FLOAT32, 1, 1) != 2) fail("it was not refused for floats");
  e.m.kind = NG_BF16;
  if (ng_multiply(&e.m, 0, x, NG_FLOAT32, &y, NG_FLOAT32, 1, 1) != 2) fail("level 0 was not refused");
  release(&e);
}

#include "check_layer.c"

int main(int count, char **arguments) {
  static const int64_t shapes[][2] = {{37, 72}, {16, 64}, {3, 200}, {1, 1}};
  level = count == 2 ? atoi(arguments[1]) : 0;
  if (level < 1) {
    fprintf(stderr, "usage: check LEVEL, 1 or more\n");
    return 2;
  }
  if (level > ng_level()) {
    fprintf(stderr, "level %d is beyond what this processor has, %d\n", level, ng_level());
    return 77;
  }
  make_grids();
  for (int kind = NG_BF16; kind <= NG_CODES8_HALF; kind++) {
    state = 0x9e3779b97f4a7c15u + (uint64_t)kind; /* the same for a kind on levels that have others before it */
    if (kind == NG_BF16_DOT && level < 2) continue;
    int codes = is_codes(kind) && !is_half(kind); /* which has no minimums, and two scales to a group alone */
    for (int shape = 0; shape < 4; shape++)
      for (int has_bias = 0; has_bias < 2; has_bias++)
        for (int has_minimums = 0; has_minimums <= codes; has_minimums++)
          for (int groups = 1; groups <= 1 + codes; groups++)
            for (int type = NG_FLOAT32; type <= (is_codes(kind) ? NG_FLOAT16 : NG_FLOAT32); type++)
              check_ordinary(kind, shapes[shape][0], shapes[shape][1], type, groups, has_minimums, has_bias);
    check_ordinary(kind, 150, 2080, NG_FLOAT16, 1, codes, 1); /* of several tasks, which threads share */
    for (int has_bias = 0; has_bias < 2; has_bias++)
      for (int has_minimums = 0; has_minimums <= codes; has_minimums++) check_special(kind, has_minimums, has_bias);
    if (is_int8(kind)) check_quantizing(kind);
  }
  for (int type = NG_BFLOAT16; type <= NG_FLOAT16; type++) {
    check_conversions(type);
    check_scales(type);
  }
  check_refusals();
  check_layers();
  return 0;
}
