/* One decoder layer, and how Python describes it (layer.py has the same fields).

Shape legend: R rows of a block (tokens of one sequence or of several), T tokens of a sequence, D hidden size, H heads
of queries, V heads of keys and values, E head size, F rotary size, I intermediate size, N keys of a sequence.       */

#include <stdint.h>

/* Root mean square norms; a weight of none for those that a family does not have. */
enum norm { NG_BEFORE_ATTENTION, NG_QUERIES, NG_KEYS, NG_AFTER_ATTENTION, NG_BEFORE_MLP, NG_AFTER_MLP, NG_NORMS };
enum activation { NG_SILU, NG_GELU_TANH };

struct layer {
  const struct matrix *projections[3]; /* queries, keys and values; or all of them in the first */
  const struct matrix *output;
  const struct matrix *gate_up[2]; /* or both in the first; none where experts follow */
  const struct matrix *down;
  const float *norms[NG_NORMS];
  int64_t norm_sizes[NG_NORMS]; /* how many are made one together */
  int64_t hidden, heads, kv_heads, head_size, rotary, intermediate;
  float eps[NG_NORMS];
  float scaling, softcap; /* of scores: the most that they come to, or 0 */
  int32_t activation, type; /* of hidden states, keys and values, cosines and sines */
  int32_t is_coded;         /* keys and values are codes: of a token and head E of them, of a byte each, and behind them
                               a scale in bfloat16 for each G */
};

/* What an adapter adds to the product of one matrix: scaling * B (A x). Python describes it (low_rank.py). */
struct low_rank {
  const void *a, *b; /* [rank][inputs], and behind it [outputs / 16][rank][16], zeros beyond the outputs */
  int64_t rank;      /* at most MAX_RANK */
  float scaling;
  int32_t type; /* of their numbers */
};
#define MAX_RANK 1024

/* The matrices of a layer that sequences may have adapters beside: where one is all of several, it is the first. */
enum place { NG_QUERY, NG_KEY, NG_VALUE, NG_OUTPUT, NG_GATE, NG_UP, NG_DOWN, NG_PLACES };

/* Keys or values of sequences: elements from a sequence, a head, a token to the next; those of a head lie together. Of
   what is coded, bytes. */
struct states {
  const void *first;
  int64_t row, head, token;
};

/* The earliest key of a sequence: its position, and its place among the keys. Behind it are the next ones, and behind the
   last place the first: a window that is written over is a ring. */
struct first_key {
  int64_t position, place;
};

/* Keys and values of one head of a sequence, N of them by places; bytes from one place to the next. */
struct head_states {
  const char *keys, *values;
  int64_t key_stride, value_stride, N;
  struct first_key first;
};

/* The keys [from, to) of its sequence that a token sees, from the earliest on, or those of them that a mask names. */
struct seen {
  int64_t from, to;
  const uint8_t *mask; /* by places, or none */
};

#define BLOCK 256     /* rows that go through a half together: their activations stay in a cache */
#define KEY_BLOCK 128 /* positions whose keys attention takes together: in which order it sums hangs on it */
#define TASK_QUERIES 128 /* that go over a block of keys together, where they are many */
#define FEW 16        /* rows that are not worth a second thread but for products */
#define FEW_KEYS 4096 /* nor are so many keys, of all rows */

struct block {
  int64_t first, rows, tokens; /* of all sequences' tokens, one after another; those of a sequence */
  int threads;
  const struct low_rank *const *adapters; /* [NG_PLACES][sequences], none where a sequence has none; or none at all */
  int64_t sequences;
};
