/* Products of few rows and of many with matrices as a checkpoint has them: bfloat16, or codes of 8 or 4 bits.

Plain C: no header of torch or Python, and no -march. What a processor has is found out when the library is loaded:
this file includes itself once for each level, and each level is compiled for its instructions. That is why it is
long; what stands between the products of a layer is in layer.c and attention.c.

Every element of a result is made by the same sums in the same order, whatever the number of rows, threads and
levels: rows that run together get the bits that they get alone. The one exception is NG_BF16_DOT, whose instruction
rounds as it likes, and only one level has.

Shape legend: R rows, O outputs, K inputs (a multiple of 32, padded with zeros), G = 32 inputs, N groups of a row.

bfloat16   [O][K], as it lies in a file.
8 bits     code + 128 as [O / 16][K / 4][16][4] bytes: 16 outputs are 16 lanes, each with four inputs.
           Floats of 8 bits (NG_CODES8_E4M3: a sign, 4 bits of exponent, 3 of fraction) lie so as they are.
4 bits     codes 0..15 as [O / 16][K / 8][16][4] bytes: the low half of byte j is input j, the high half input 4 + j.
scales     [O / 16][N][16] of float16, bfloat16 or float32: one for each 32 inputs, or for each multiple of that;
           [O / 16][2 N][16] of NG_CODES8_HALF, one for each 16.
minimums   the same, or none. A weight is table[code] * scale + minimum; the table of 8 bits is code itself.        */

#ifndef NG_LEVEL

#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#else
#error "no products for this processor"
#endif

#include "layer.h"

#define G 32
#define LANES 16
#define SPIKY 1700 /* mean square of a group's codes, zeros left out: below it the largest is 3.1 times its root */
#define PREFETCH 8192 /* bytes ahead, where a matrix is read from memory: what one core takes of it in 0.3 us */
#define INLINE static inline __attribute__((always_inline))

enum kind { NG_BF16, NG_BF16_DOT, NG_CODES8, NG_CODES8_INT8, NG_CODES4, NG_CODES4_INT8, NG_CODES8_HALF, NG_CODES8_E4M3, NG_KINDS };
enum type { NG_FLOAT32, NG_BFLOAT16, NG_FLOAT16 };

/* One matrix, as Python describes it (compiled.py has the same fields). */
struct matrix {
  const void *weights, *scales, *minimums;
  const float *table; /* of 16 */
  const float *bias;  /* or none */
  int64_t outputs, inputs, padded_inputs, scale_groups; /* groups of 32 that share a scale */
  int32_t kind, scale_type;
};

/* One product, while it is made. */
struct product {
  const struct matrix *m;
  const float *x;      /* [R][K] */
  const uint16_t *x16; /* [R][K], bfloat16 */
  int8_t *codes;       /* [R][K] */
  float *scales;       /* [R][N] */
  int32_t *starts;     /* [R][N]: what integer sums begin with */
  int8_t *digits;        /* [R][K]: second digits, of groups that have them; of NG_CODES8_INT8 */
  int32_t *digit_starts; /* [R][N] */
  int32_t *spiky;        /* [R][1 + N]: how many groups have them, and which */
  float *x_sums;       /* [R][N]: for minimums */
  void *y;             /* [R][O] */
  int64_t rows;
  int32_t y_type;
};

int ng_multiply(const struct matrix *m, int level, const void *x, int x_type, void *y, int y_type, int64_t rows,
                int threads);

/* Of outputs [from, to), which begin at a multiple of what a task has. */
typedef void (*task)(const struct product *, int64_t from, int64_t to);

INLINE float from_bf16(uint16_t bits) {
  uint32_t wide = (uint32_t)bits << 16;
  float value;
  memcpy(&value, &wide, 4);
  return value;
}

INLINE uint16_t to_bf16(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  if (value != value) return (uint16_t)(bits >> 16 | 64);
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE float from_f16(uint16_t bits) {
  uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, wide;
  float value;
  if (rest >= 0x7c00) {
    wide = sign | 0x7f800000 | (rest & 0x3ff) << 13;
  } else if (rest >= 0x400) {
    wide = sign | ((rest << 13) + (112u << 23));
  } else {
    value = (float)rest * 0x1p-24f;
    return sign ? -value : value;
  }
  memcpy(&value, &wide, 4);
  return value;
}

INLINE uint16_t to_f16(float value) {
  uint32_t bits, sign;
  memcpy(&bits, &value, 4);
  sign = bits >> 16 & 0x8000;
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
  if (bits < 0x38800000) { /* below 2^-14: a multiple of 2^-24, which adding 0.5 rounds to */
    float sum;
    memcpy(&sum, &bits, 4);
    sum += 0.5f;
    memcpy(&bits, &sum, 4);
    return (uint16_t)(sign | (bits - 0x3f000000));
  }
  bits += 0xfff + (bits >> 13 & 1);
  return (uint16_t)(sign | (bits - 0x38000000) >> 13);
}

/* The even ones of 32, then the odd ones. */
INLINE void deal(float *x) {
  float dealt[G];
  for (int i = 0; i < LANES; i++) {
    dealt[i] = x[2 * i];
    dealt[LANES + i] = x[2 * i + 1];
  }
  memcpy(x, dealt, sizeof dealt);
}

INLINE void put(const struct product *p, int64_t row, int64_t output, float value) {
  const struct matrix *m = p->m;
  int64_t at = row * m->outputs + output;
  if (m->bias) value += m->bias[output];
  if (p->y_type == NG_FLOAT32) ((float *)p->y)[at] = value;
  else if (p->y_type == NG_BFLOAT16) ((uint16_t *)p->y)[at] = to_bf16(value);
  else ((uint16_t *)p->y)[at] = to_f16(value);
}

#define UNROLL _Pragma("GCC unroll 16")

/* A product that is rounded before it is added to another: of two, compilers choose which to add without rounding. */
#if defined(__x86_64__)
#define ROUNDED(V) __asm__("" : "+v"(V))
#else
#define ROUNDED(V) __asm__("" : "+w"(V))
#endif

/* ---------------------------------------------------------------------------------------------- levels */

#define JOIN2(A, B_) A##_##B_
#define JOIN(A, B_) JOIN2(A, B_)
#define NAME(A) JOIN(A, NG_LEVEL)

#if defined(__x86_64__)

#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")
#define NG_LEVEL avx512
#include "kernels.c"
#undef NG_LEVEL
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#define NG_LEVEL avx2
#define NG_AVX2
#include "kernels.c"
#undef NG_AVX2
#undef NG_LEVEL
#pragma GCC pop_options

#else

#define NG_LEVEL neon
#include "kernels.c"
#undef NG_LEVEL

#endif

/* ---------------------------------------------------------------------------------------------- interface */

/* Which functions with which arguments there are: another number for each change of them. */
int ng_interface(void) { return 4; }

/* 0 none, 1 AVX2 or NEON, 2 AVX-512 with VNNI and bfloat16. */
int ng_level(void) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c")) return 0;
  return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bf16") &&
                 __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                 __builtin_cpu_supports("avx512dq")
             ? 2
             : 1;
#else
  return 1;
#endif
}

static void run(const struct product *p, task of, int64_t size, int threads) {
  int64_t outputs = p->m->outputs, tasks = (outputs + size - 1) / size;
  if (threads <= 1 || tasks == 1) {
    for (int64_t t = 0; t < tasks; t++) of(p, t * size, (t + 1) * size < outputs ? (t + 1) * size : outputs);
    return;
  }
  /* Whoever is free takes the next: another process may have a core, and who shares it is late. */
#pragma omp parallel for schedule(dynamic) num_threads(threads)
  for (int64_t t = 0; t < tasks; t++) of(p, t * size, (t + 1) * size < outputs ? (t + 1) * size : outputs);
}

/* x [R, inputs] of x_type times the matrix, into y [R, outputs] of y_type.
   0, or 1 where there is no memory, or 2 where the level has no such product. */
int ng_multiply(const struct matrix *m, int level, const void *x, int x_type, void *y, int y_type, int64_t rows,
                int threads) {
  int64_t K = m->padded_inputs, N = K / G, I = m->inputs;
  int is_int8 = m->kind == NG_CODES8_INT8 || m->kind == NG_CODES4_INT8, is_dot = m->kind == NG_BF16_DOT;
  struct product p = {.m = m, .y = y, .rows = rows, .y_type = y_type};
  if (level < 1 || m->kind < 0 || m->kind >= NG_KINDS || (is_dot && (level < 2 || x_type != NG_BFLOAT16))) return 2;
  int is_plain = I == K && m->kind != NG_BF16 && x_type == (is_dot ? NG_BFLOAT16 : NG_FLOAT32);
  size_t wide = is_plain ? 0 : (size_t)(rows * K) * (is_dot ? 2 : 4);
  size_t codes = is_int8 ? (size_t)(rows * K) : 0, groups = (size_t)(rows * N) * 4;
  int has_digits = m->kind == NG_CODES8_INT8;
  size_t size = wide + codes + (is_int8 ? 2 * groups : 0) + (m->minimums ? groups : 0);
  if (has_digits) size += codes + 2 * groups + (size_t)rows * 4;
  char *memory = size ? malloc(size) : NULL, *at = memory;
  if (size && !memory) return 1;
  if (is_plain) {
    p.x = x;
    p.x16 = x;
  } else if (is_dot) {
    uint16_t *to = (uint16_t *)at;
    at += wide;
    for (int64_t r = 0; r < rows; r++) {
      memcpy(to + r * K, (const uint16_t *)x + r * I, (size_t)I * 2);
      memset(to + r * K + I, 0, (size_t)(K - I) * 2);
    }
    p.x16 = to;
  } else {
    float *to = (float *)at;
    at += wide;
    for (int64_t r = 0; r < rows; r++) {
      const uint16_t *from = (const uint16_t *)x + r * I;
      if (x_type == NG_FLOAT32) memcpy(to + r * K, (const float *)x + r * I, (size_t)I * 4);
      else if (x_type == NG_BFLOAT16) for (int64_t i = 0; i < I; i++) to[r * K + i] = from_bf16(from[i]);
      else for (int64_t i = 0; i < I; i++) to[r * K + i] = from_f16(from[i]);
      memset(to + r * K + I, 0, (size_t)(K - I) * 4);
    }
    if (m->kind == NG_BF16)
      for (int64_t n = 0; n < rows * N; n++) deal(to + n * G);
    p.x = to;
  }
  if (is_int8) {
    p.scales = (float *)at;
    p.starts = (int32_t *)(at + groups);
    at += 2 * groups;
  }
  if (has_digits) {
    p.digit_starts = (int32_t *)at;
    at += groups;
    p.spiky = (int32_t *)at;
    at += groups + (size_t)rows * 4;
    p.digits = (int8_t *)at;
    at += codes;
  }
  if (m->minimums) {
    p.x_sums = (float *)at;
    at += groups;
  }
  p.codes = (int8_t *)at;
  task of;
  int64_t task_size;
#define PREPARE(LEVEL) of = JOIN(prepare, LEVEL)(&p, &task_size)
#if defined(__x86_64__)
  if (level >= 2) PREPARE(avx512);
  else PREPARE(avx2);
#else
  PREPARE(neon);
#endif
  run(&p, of, task_size, threads);
  free(memory);
  return 0;
}

#if defined(__x86_64__)
#define OF_LEVEL(FUNCTION) (level >= 2 ? JOIN(FUNCTION, avx512) : JOIN(FUNCTION, avx2))
#else
#define OF_LEVEL(FUNCTION) JOIN(FUNCTION, neon)
#endif

/* Add to y [rows, outputs] what the adapter of each row makes of x [rows, inputs]; there may be none. */
void ng_adapt(int level, const struct low_rank *const *adapters, const float *x, float *y, int64_t rows, int64_t inputs,
              int64_t outputs, int threads) {
  (void)level; /* where there is one */
  OF_LEVEL(add_each)(adapters, x, y, 0, rows, 1, inputs, outputs, threads);
}

/* What a decoder layer does before the keys and values of new tokens are kept: norm, projections, rotary embedding.
   Of sequences with T tokens each: hidden states [sequences, T, D]; cosines and sines [angles, T, F], one for all
   sequences or for each; into queries [sequences, T, H, E] in float32, keys and values [sequences, V, T, E] or codes.
   Adapters [NG_PLACES, sequences] are those of each sequence beside each matrix, or none.
   Returns as ng_multiply. */
int ng_project_layer(const struct layer *l, int level, const void *hidden, int64_t sequences, int64_t tokens,
                       const void *cosines, const void *sines, int64_t angles, float *queries, void *keys,
                       void *values, const struct low_rank *const *adapters, int threads) {
  return OF_LEVEL(project)(l, level, hidden, sequences, tokens, cosines, sines, angles, queries, keys, values, adapters,
                           threads);
}

/* The rest: attention of those tokens over N keys of their sequence, which end with their own, or over those that a
   mask [sequences, T, N] names, of which each sequence's first is told; output, and the MLP. Into the hidden states that
   leave the layer; where no MLP is told, into those before it, and their norm. */
int ng_finish_layer(const struct layer *l, int level, const void *hidden, int64_t sequences, int64_t tokens,
                      const float *queries, const struct states *keys, const struct states *values, int64_t N,
                      const struct first_key *firsts, const uint8_t *mask, void *result, void *normed,
                      const struct low_rank *const *adapters, int threads) {
  return OF_LEVEL(finish)(l, level, hidden, sequences, tokens, queries, keys, values, N, firsts, mask, result, normed,
                          adapters, threads);
}

#else /* NG_LEVEL: what follows is compiled once for each level */

#undef WIDTH
#if defined(__aarch64__)
#define WIDTH 4
#elif defined(NG_AVX2)
#define WIDTH 8
#else
#define WIDTH 16
#endif
#define HALVES (LANES / WIDTH) /* vectors of a block of 16 outputs */

typedef float NAME(f32) __attribute__((vector_size(WIDTH * 4)));
typedef int32_t NAME(i32) __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t NAME(u32) __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t NAME(u16) __attribute__((vector_size(WIDTH * 2)));
typedef int8_t NAME(i8) __attribute__((vector_size(WIDTH)));
#define f32 NAME(f32)
#define i32 NAME(i32)
#define u32 NAME(u32)
#define u16 NAME(u16)

INLINE f32 NAME(load)(const float *from) {
  f32 values;
  memcpy(&values, from, sizeof values);
  return values;
}

INLINE u32 NAME(load_bytes)(const void *from) {
  u32 bytes;
  memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

/* ---------------------------------------------------------------------------------------------- what levels differ in */

INLINE f32 NAME(load_scales)(const void *from, int64_t at, int type) {
  const uint16_t *half = (const uint16_t *)from + at;
  if (type == NG_FLOAT32) return NAME(load)((const float *)from + at);
  if (type == NG_BFLOAT16) {
    u16 bits;
    memcpy(&bits, half, sizeof bits);
    return (f32)(__builtin_convertvector(bits, u32) << 16);
  }
#if defined(__aarch64__)
  return (f32)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(half)));
#elif defined(NG_AVX2)
  return (f32)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)half));
#else
  return (f32)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)half));
#endif
}

/* WIDTH codes of a byte each, as numbers. A conversion of the compiler's own takes them one by one. */
INLINE f32 NAME(from_codes)(const char *codes) {
#if defined(__aarch64__)
  int32_t four;
  memcpy(&four, codes, sizeof four);
  const int16x8_t halves = vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)));
  return (f32)vcvtq_f32_s32(vmovl_s16(vget_low_s16(halves)));
#elif defined(NG_AVX2)
  return (f32)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes)));
#else
  return (f32)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)codes)));
#endif
}

/* Entries of a table of 16 by the low four bits of each lane. */
INLINE f32 NAME(look_up)(const float *table, u32 at) {
#if defined(__aarch64__)
  uint8x16x4_t bytes;
  for (int i = 0; i < 4; i++) bytes.val[i] = vreinterpretq_u8_f32(vld1q_f32(table + 4 * i));
  return (f32)vqtbl4q_u8(bytes, (uint8x16_t)((at & 15u) * 0x04040404u + 0x03020100u));
#elif defined(NG_AVX2)
  __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
  return (f32)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, (__m256i)at), _mm256_permutevar8x32_ps(high, (__m256i)at),
                               (__m256)(at << 28));
#else
  return (f32)_mm512_permutexvar_ps((__m512i)at, _mm512_loadu_ps(table));
#endif
}

/* Floats of 8 bits, each in the highest byte of its lane. The exponent is put where that of float32 is, and made right
   by a product: so those without one (below 2^-6) are exact, too, unless somebody has denormals flushed. */
INLINE f32 NAME(from_e4m3)(u32 high) {
  return (f32)((u32)((i32)high >> 4) & 0x87f00000u) * 0x1p120f;
}

/* To each lane the sum of its four bytes times four signed ones, which are the same for all lanes. The bytes are
   codes of 4 bits, or 128 more than codes of 8: where that is not exact, it is taken away first (see `zero`). */
INLINE i32 NAME(dot)(i32 sum, u32 bytes, int32_t four, const int is_8) {
#if defined(__aarch64__)
  int8x16_t x = vreinterpretq_s8_s32(vdupq_n_s32(four)), w = (int8x16_t)bytes;
  if (is_8) w = veorq_s8(w, vdupq_n_s8(-128));
  int16x8_t low = vmull_s8(vget_low_s8(w), vget_low_s8(x)), high = vmull_s8(vget_high_s8(w), vget_high_s8(x));
  return (i32)vaddq_s32((int32x4_t)sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
#elif defined(NG_AVX2)
  __m256i x = _mm256_set1_epi32(four), w = (__m256i)bytes, pairs;
  if (is_8) {
    w = _mm256_xor_si256(w, _mm256_set1_epi8(-128));
    pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w));
  } else {
    pairs = _mm256_maddubs_epi16(w, x);
  }
  return sum + (i32)_mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
#else
  (void)is_8;
  return (i32)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)bytes, _mm512_set1_epi32(four));
#endif
}

/* What `dot` has for a code of zero. */
INLINE int32_t NAME(zero)(const int is_8) {
#if defined(__aarch64__) || defined(NG_AVX2)
  return is_8 ? 0 : 8;
#else
  return is_8 ? 128 : 8;
#endif
}

INLINE f32 NAME(dot_bf16)(f32 sum, u32 pairs, u32 x) {
#if defined(__aarch64__) || defined(NG_AVX2)
  (void)pairs, (void)x; /* not there, and not asked for */
  return sum;
#else
  return (f32)_mm512_dpbf16_ps((__m512)sum, (__m512bh)pairs, (__m512bh)x);
#endif
}

/* The sum of 16 lanes: the halves are added, and the halves of that, so that every level has the same order. */
INLINE float NAME(sum)(const f32 *v) {
#if defined(__aarch64__)
  const float32x4_t four = (float32x4_t)((v[0] + v[2]) + (v[1] + v[3]));
  const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
  return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
#else
#if defined(NG_AVX2)
  const __m256 eight = (__m256)(v[0] + v[1]);
#else
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[0]), _mm512_extractf32x8_ps((__m512)v[0], 1));
#endif
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_movehdup_ps(two));
#endif
}

INLINE int32_t NAME(total)(i32 v) {
  int32_t total = 0;
  for (int i = 0; i < WIDTH; i++) total += v[i];
  return total;
}

/* ---------------------------------------------------------------------------------------------- activations */

/* Codes of 8 bits with a scale for each 32, the largest magnitude / 127; what is not finite makes its scale so. And
   what the sums of a group begin with, so that they are those of weights around zero.

   A group in which few are nearly as large as the largest has little in its codes of the others, zeros aside: it has a
   second digit of each, in parts of 1 / 254 of a code, where there is room for them. */
static void NAME(quantize)(const struct product *p, int64_t groups, int32_t zero) {
  const int64_t N = p->m->padded_inputs / G;
  for (int64_t n = 0; n < groups; n++) {
    const float *from = p->x + n * G;
    int8_t *codes = p->codes + n * G;
    float most = 0;
    int is_nan = 0;
    for (int i = 0; i < G; i++) {
      float magnitude = fabsf(from[i]);
      most = magnitude > most ? magnitude : most;
      is_nan |= !(magnitude <= INFINITY);
    }
    int is_finite = most < INFINITY && !is_nan;
    float inverse = most > 0 && is_finite ? 127.f / most : 0.f;
    i32 sum = {0}, squares = {0}, nonzero = {0};
    if (!(inverse < INFINITY)) inverse = 0; /* a group of denormals is zero */
    for (int i = 0; i < G; i += WIDTH) {
      const f32 x = inverse ? NAME(load)(from + i) : (f32){0};
      /* Adding 1.5 x 2^23 rounds to an even integer, on every level. */
      const i32 code = (i32)(x * inverse + 12582912.f) - 0x4b400000;
      const NAME(i8) narrow = __builtin_convertvector(code, NAME(i8));
      memcpy(codes + i, &narrow, sizeof narrow);
      sum += code;
      squares += code * code;
      nonzero -= x != 0;
    }
    p->scales[n] = is_finite ? most / 127.f : is_nan ? NAN : INFINITY;
    int32_t total = NAME(total)(sum);
    if (!is_finite) { /* so that the scale meets something: infinity times nothing would be nothing of it */
      codes[0] = 1;
      total = 1;
    }
    p->starts[n] = -zero * total;
    if (!p->digits) continue;
    int32_t *spiky = p->spiky + n / N * (1 + N);
    if (n % N == 0) *spiky = 0;
    if (!inverse || NAME(total)(squares) >= SPIKY * NAME(total)(nonzero)) continue;
    spiky[++*spiky] = (int32_t)(n % N);
    sum = (i32){0};
    for (int i = 0; i < G; i += WIDTH) {
      NAME(i8) narrow;
      memcpy(&narrow, codes + i, sizeof narrow);
      f32 x = NAME(load)(from + i) * inverse;
      ROUNDED(x);
      const i32 digit = (i32)((x - __builtin_convertvector(narrow, f32)) * 254.f + 12582912.f) - 0x4b400000;
      narrow = __builtin_convertvector(digit, NAME(i8));
      memcpy(p->digits + n * G + i, &narrow, sizeof narrow);
      sum += digit;
    }
    p->digit_starts[n] = -zero * NAME(total)(sum);
  }
}

/* ---------------------------------------------------------------------------------------------- products */

/* bfloat16 as it lies: 16 sums, of one input after another, the even ones of 32 before the odd ones (`deal`). */
INLINE void NAME(bf16_tile)(const struct product *p, int64_t row, int64_t output, const int B, const int OUT,
                            const int is_dot) {
  const int64_t I = p->m->inputs, K = p->m->padded_inputs;
  const uint16_t *w = (const uint16_t *)p->m->weights + output * I;
  uint16_t last[4][G];
  f32 sums[16 * HALVES];
  UNROLL for (int i = 0; i < B * OUT * HALVES; i++) sums[i] = (f32){0};
  for (int64_t k = 0; k < K; k += G) {
    const uint16_t *from = w + k;
    int64_t stride = I;
    if (k + G > I) {
      memset(last, 0, sizeof last);
      for (int o = 0; o < OUT; o++) memcpy(last[o], from + o * I, (size_t)(I - k) * 2);
      from = last[0];
      stride = G;
    }
    if (OUT == 1) __builtin_prefetch(from + PREFETCH / 2);
    UNROLL for (int h = 0; h < HALVES; h++) {
      u32 pairs[4];
      UNROLL for (int o = 0; o < OUT; o++) pairs[o] = NAME(load_bytes)(from + o * stride + h * WIDTH * 2);
      UNROLL for (int b = 0; b < B; b++) {
        if (is_dot) {
          const u32 x = NAME(load_bytes)(p->x16 + (row + b) * K + k + h * WIDTH * 2);
          UNROLL for (int o = 0; o < OUT; o++) {
            f32 *sum = &sums[(b * OUT + o) * HALVES + h];
            *sum = NAME(dot_bf16)(*sum, pairs[o], x);
          }
        } else {
          const float *x = p->x + (row + b) * K + k + h * WIDTH;
          const f32 even = NAME(load)(x), odd = NAME(load)(x + LANES);
          UNROLL for (int o = 0; o < OUT; o++) {
            f32 *sum = &sums[(b * OUT + o) * HALVES + h];
            /* Added once: a row alone waits for its one sum, and not for the two products. */
            f32 first = (f32)(pairs[o] << 16) * even;
            ROUNDED(first);
            *sum += first + (f32)(pairs[o] & 0xffff0000u) * odd;
          }
        }
      }
    }
  }
  UNROLL for (int b = 0; b < B; b++)
    UNROLL for (int o = 0; o < OUT; o++) put(p, row + b, output + o, NAME(sum)(&sums[(b * OUT + o) * HALVES]));
}

/* What the second digits of a group of a row add to a vector of outputs, whose codes of that group begin at `w`. */
INLINE f32 NAME(of_digits)(const struct product *p, int64_t row, int64_t n, const uint8_t *w, int64_t scale_at) {
  const int64_t K = p->m->padded_inputs, N = K / G;
  const int8_t *x = p->digits + row * K + n * G;
  i32 even = (i32){0} + p->digit_starts[row * N + n], odd = {0};
  UNROLL for (int k = 0; k < 8; k += 2) {
    int32_t four[2];
    memcpy(four, x + k * 4, 8);
    even = NAME(dot)(even, NAME(load_bytes)(w + k * 64), four[0], 1);
    odd = NAME(dot)(odd, NAME(load_bytes)(w + (k + 1) * 64), four[1], 1);
  }
  const f32 scale = NAME(load_scales)(p->m->scales, scale_at, p->m->scale_type);
  return __builtin_convertvector(even + odd, f32) * (scale * (p->scales[row * N + n] / 254.f));
}

/* What all second digits of a row add to a vector of outputs. Where rows go together, few groups of each have them. */
static __attribute__((noinline)) void NAME(add_digits)(const struct product *p, int64_t row, int64_t vector,
                                                        float *lanes) {
  const struct matrix *m = p->m;
  const int64_t K = m->padded_inputs, N = K / G;
  const int64_t block = vector / HALVES, lane = vector % HALVES * WIDTH;
  const uint8_t *w = (const uint8_t *)m->weights + block * K * LANES + lane * 4;
  const int32_t *spiky = p->spiky + row * (1 + N);
  f32 sum = {0};
  for (int32_t i = 1; i <= *spiky; i++) {
    const int64_t n = spiky[i];
    const int64_t scale_at = (block * (N / m->scale_groups) + n / m->scale_groups) * LANES + lane;
    f32 more = NAME(of_digits)(p, row, n, w + n * G * LANES, scale_at);
    ROUNDED(more);
    sum += more;
  }
  sum += NAME(load)(lanes);
  memcpy(lanes, &sum, sizeof sum);
}

/* Codes: vectors of outputs, so many to a block of 16. */
INLINE void NAME(codes_tile)(const struct product *p, int64_t row, int64_t vector, const int B, const int OUT,
                             const int is_8, const int is_int8, const int is_half, const int is_e4m3) {
  const struct matrix *m = p->m;
  const int64_t K = m->padded_inputs, N = K / G, num_scales = is_half ? 2 * N : N / m->scale_groups;
  const int64_t block_bytes = is_8 ? K * LANES : K * LANES / 2;
  const int steps = is_8 ? 8 : 4, inputs = G / steps; /* of a group; of a step */
  const uint8_t *w[4];
  int64_t scale_at[4];
  f32 sums[16];
  UNROLL for (int o = 0; o < OUT; o++) {
    const int64_t block = (vector + o) / HALVES, lane = (vector + o) % HALVES * WIDTH;
    w[o] = (const uint8_t *)m->weights + block * block_bytes + lane * 4;
    scale_at[o] = block * num_scales * LANES + lane;
  }
  UNROLL for (int i = 0; i < B * OUT; i++) sums[i] = (f32){0};
  /* A row alone has its second digits where the codes are at hand. */
  const int32_t *spiky = is_int8 && is_8 ? p->spiky + row * (1 + N) : NULL, *next = spiky;
  f32 of_digits[4];
  UNROLL for (int o = 0; o < OUT; o++) of_digits[o] = (f32){0};
  int64_t next_spiky = spiky && B == 1 && *spiky ? *++next : -1;
  for (int64_t n = 0, left = m->scale_groups; n < N; n++) {
    f32 part[16];
    i32 whole[16];
    UNROLL for (int b = 0; b < B; b++)
      UNROLL for (int o = 0; o < OUT; o++) {
        if (is_int8) whole[b * OUT + o] = (i32){0} + p->starts[(row + b) * N + n];
        else part[b * OUT + o] = (f32){0};
      }
    UNROLL for (int k = 0; k < steps; k++)
      UNROLL for (int o = 0; o < OUT; o++) {
        if (is_half && k == steps / 2) { /* the first 16 have their scale, the next follows it */
          const f32 scale = NAME(load_scales)(m->scales, scale_at[o], m->scale_type);
          UNROLL for (int b = 0; b < B; b++) {
            sums[b * OUT + o] += part[b * OUT + o] * scale;
            part[b * OUT + o] = (f32){0};
          }
          scale_at[o] += LANES;
        }
        const u32 v = NAME(load_bytes)(w[o] + k * 64);
        __builtin_prefetch(w[o] + k * 64 + PREFETCH);
        if (is_int8) {
          UNROLL for (int b = 0; b < B; b++) {
            const int8_t *x = p->codes + (row + b) * K + n * G + k * inputs;
            i32 *sum = &whole[b * OUT + o];
            int32_t four;
            memcpy(&four, x, 4);
            if (is_8) {
              *sum = NAME(dot)(*sum, v, four, 1);
            } else {
              *sum = NAME(dot)(*sum, v & 0x0f0f0f0fu, four, 0);
              memcpy(&four, x + 4, 4);
              *sum = NAME(dot)(*sum, v >> 4 & 0x0f0f0f0fu, four, 0);
            }
          }
        } else {
          UNROLL for (int j = 0; j < 4; j++) {
            const float *x = p->x + row * K + n * G + k * inputs + j;
            if (is_8) {
              const f32 a = is_e4m3 ? NAME(from_e4m3)(v << (24 - 8 * j))
                                    : __builtin_convertvector((i32)(v >> (8 * j) & 255u) - 128, f32);
              UNROLL for (int b = 0; b < B; b++) part[b * OUT + o] += a * x[b * K];
            } else {
              const f32 a = NAME(look_up)(m->table, v >> (8 * j)), c = NAME(look_up)(m->table, v >> (8 * j + 4));
              UNROLL for (int b = 0; b < B; b++) {
                part[b * OUT + o] += a * x[b * K];
                part[b * OUT + o] += c * x[b * K + 4];
              }
            }
          }
        }
      }
    UNROLL for (int o = 0; o < OUT; o++) {
      const f32 scale = NAME(load_scales)(m->scales, scale_at[o], m->scale_type);
      UNROLL for (int b = 0; b < B; b++) {
        f32 *sum = &sums[b * OUT + o];
        if (is_int8) *sum += __builtin_convertvector(whole[b * OUT + o], f32) * (scale * p->scales[(row + b) * N + n]);
        else *sum += part[b * OUT + o] * scale;
      }
      if (m->minimums) {
        const f32 minimum = NAME(load_scales)(m->minimums, scale_at[o], m->scale_type);
        UNROLL for (int b = 0; b < B; b++) sums[b * OUT + o] += minimum * p->x_sums[(row + b) * N + n];
      }
      if (B == 1 && is_int8 && is_8 && n == next_spiky) {
        f32 more = NAME(of_digits)(p, row, n, w[o], scale_at[o]);
        ROUNDED(more);
        of_digits[o] += more;
      }
      w[o] += steps * 64;
    }
    if (B == 1 && n == next_spiky) next_spiky = next < spiky + *spiky ? *++next : -1;
    if (!--left) {
      left = m->scale_groups;
      UNROLL for (int o = 0; o < OUT; o++) scale_at[o] += LANES;
    }
  }
  UNROLL for (int b = 0; b < B; b++)
    UNROLL for (int o = 0; o < OUT; o++) {
      float lanes[WIDTH];
      memcpy(lanes, &sums[b * OUT + o], sizeof lanes);
      if (is_int8 && is_8 && p->spiky[(row + b) * (1 + N)]) {
        if (B == 1) sums[o] += of_digits[o];
        if (B == 1) memcpy(lanes, &sums[o], sizeof lanes);
        else NAME(add_digits)(p, row + b, vector + o, lanes);
      }
      for (int64_t i = 0, first = (vector + o) * WIDTH; i < WIDTH && first + i < m->outputs; i++)
        put(p, row + b, first + i, lanes[i]);
    }
}

/* Outputs [FIRST, LAST) of B rows, so many at a time; then the next rows. */
#define OUTPUTS(TILE, B, OUT, FIRST, LAST, ...)                             \
  {                                                                         \
    int64_t o = FIRST;                                                      \
    for (; o + OUT <= LAST; o += OUT) TILE(p, row, o, B, OUT, __VA_ARGS__); \
    for (; o < LAST; o++) TILE(p, row, o, B, 1, __VA_ARGS__);               \
    row += B;                                                               \
  }
/* A few rows wait for the matrix, which comes soonest as one stream; many wait for registers to fill, of which there
   are 32 of 16 lanes, 16 of 8, 32 of 4. */
#if WIDTH == 16
#define BF16(ROWS, FIRST, LAST, ...)                                                 \
  if (p->rows > 8 && ROWS >= 4) OUTPUTS(NAME(bf16_tile), 4, 4, FIRST, LAST, __VA_ARGS__) \
  else if (ROWS >= 8) OUTPUTS(NAME(bf16_tile), 8, 1, FIRST, LAST, __VA_ARGS__)       \
  else if (ROWS >= 4) OUTPUTS(NAME(bf16_tile), 4, 1, FIRST, LAST, __VA_ARGS__)       \
  else if (ROWS >= 2) OUTPUTS(NAME(bf16_tile), 2, 1, FIRST, LAST, __VA_ARGS__)       \
  else OUTPUTS(NAME(bf16_tile), 1, 1, FIRST, LAST, __VA_ARGS__)
#define CODES(ROWS, FIRST, LAST, ...)                                                \
  if (ROWS >= 8) OUTPUTS(NAME(codes_tile), 8, 1, FIRST, LAST, __VA_ARGS__)           \
  else if (ROWS >= 4) OUTPUTS(NAME(codes_tile), 4, 1, FIRST, LAST, __VA_ARGS__)      \
  else if (ROWS >= 2) OUTPUTS(NAME(codes_tile), 2, 1, FIRST, LAST, __VA_ARGS__)      \
  else OUTPUTS(NAME(codes_tile), 1, 1, FIRST, LAST, __VA_ARGS__)
#else
#define BF16(ROWS, FIRST, LAST, ...)                                                 \
  if (p->rows > 8 && ROWS >= 2) OUTPUTS(NAME(bf16_tile), 2, 2, FIRST, LAST, __VA_ARGS__) \
  else if (ROWS >= 4) OUTPUTS(NAME(bf16_tile), 4, 1, FIRST, LAST, __VA_ARGS__)       \
  else if (ROWS >= 2) OUTPUTS(NAME(bf16_tile), 2, 1, FIRST, LAST, __VA_ARGS__)       \
  else OUTPUTS(NAME(bf16_tile), 1, 1, FIRST, LAST, __VA_ARGS__)
#define CODES(ROWS, FIRST, LAST, ...)                                                \
  if (ROWS >= 4) OUTPUTS(NAME(codes_tile), 4, 1, FIRST, LAST, __VA_ARGS__)           \
  else if (ROWS >= 2) OUTPUTS(NAME(codes_tile), 2, 1, FIRST, LAST, __VA_ARGS__)      \
  else OUTPUTS(NAME(codes_tile), 1, 2, FIRST, LAST, __VA_ARGS__)
#endif

static void NAME(bf16)(const struct product *p, int64_t from, int64_t to) {
  for (int64_t row = 0; row < p->rows;) {
    BF16(p->rows - row, from, to, 0)
  }
}
static void NAME(bf16_dot)(const struct product *p, int64_t from, int64_t to) {
  for (int64_t row = 0; row < p->rows;) {
    BF16(p->rows - row, from, to, 1)
  }
}
#define TASK(TASK_NAME, IS_8, ...)                                                        \
  static void NAME(TASK_NAME)(const struct product *p, int64_t from, int64_t to) {        \
    for (int64_t row = 0; row < p->rows;) {                                               \
      CODES(p->rows - row, from / WIDTH, (to + WIDTH - 1) / WIDTH, IS_8, __VA_ARGS__)     \
    }                                                                                     \
  }
TASK(codes8, 1, 0, 0, 0)
TASK(codes8_int8, 1, 1, 0, 0)
TASK(codes4, 0, 0, 0, 0)
TASK(codes4_int8, 0, 1, 0, 0)
TASK(codes8_half, 1, 0, 1, 0)
TASK(codes8_e4m3, 1, 0, 0, 1)
#undef TASK
#undef CODES
#undef BF16
#undef OUTPUTS

/* What the product needs of its activations; what it is made by, and how many outputs a task of it has. */
static task NAME(prepare)(struct product *p, int64_t *task_size) {
  const struct matrix *m = p->m;
  const int64_t K = m->padded_inputs, groups = p->rows * K / G;
  static const task tasks[] = {NAME(bf16),        NAME(bf16_dot), NAME(codes8),
                               NAME(codes8_int8), NAME(codes4),   NAME(codes4_int8),
                               NAME(codes8_half), NAME(codes8_e4m3)};
  if (m->kind == NG_CODES8_INT8 || m->kind == NG_CODES4_INT8)
    NAME(quantize)(p, groups, NAME(zero)(m->kind == NG_CODES8_INT8));
  if (m->minimums)
    for (int64_t n = 0; n < groups; n++) {
      f32 both[HALVES];
      for (int h = 0; h < HALVES; h++) {
        const float *from = p->x + n * G + h * WIDTH;
        both[h] = NAME(load)(from) + NAME(load)(from + LANES);
      }
      p->x_sums[n] = NAME(sum)(both);
    }
  /* Some 128 KiB of the matrix, which stay in a cache while all rows go over them. */
  int64_t size = 131072 / (m->kind <= NG_BF16_DOT ? 2 * K : K);
  *task_size = (size > 64 ? size : 64) / 64 * 64;
  return tasks[m->kind];
}

#include "layer.c"

#undef f32
#undef i32
#undef u32
#undef u16

#endif
