// Scaled dot-product attention, its gradient, and the tangents of both, for float32 and float64 on a CPU.
//
// P = softmax(S) with S = s Q K^T + M; O = P V; G is the cotangent of O, d marks tangents, m(t) is the mean of t under
// the weights of a row, and t' = t - m(t). A panel of query rows holds, against all keys that it sees,
//
//   S,  dS = s (dQ K^T + Q dK^T),  C = G V^T,  E = dG V^T + G dV^T,
//   dP = P dS',  A = P C',  dA = P W'  with  W = E + dS' C'
//
// elementwise, and from them O, dO = dP V + P dV; the gradient s A K, s A^T Q, P^T G; and its tangent
// s (dA K + A dK), s (dA^T Q + A^T dQ), dP^T G + P^T dG. That is 2 products for O, 5 for the gradient, and 14 for the
// tangent of the gradient and dO together. Each of a panel's numbers is used in all products before the next panel, and
// nothing of the size of P is ever there. Dropout multiplies P by a constant where it meets V or G. A soft-cap c makes
// the scores c t with t = tanh(S / c), before the mask: dS and what is pulled back to S have 1 - t^2 as a factor, and
// the tangent of the latter gains -2 t / c times dS A. What is pulled back to S, before the soft-cap, is also the gradient by M.
//
// A mask is often smaller than the weights, and its gradient is a sum over all heads that share it. So heads come in
// groups, one for each matrix of the mask's gradient (one for each head where nobody wants it), and a task adds those of
// its group one after another, for a chunk of the rows and, where chunks are too few, a slice of the group.

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

#ifndef _OPENMP
constexpr int omp_get_thread_num() { return 0; }
#endif

// Keys that one product takes at a time; rows of a panel are chosen by the caller.
constexpr long TILE = 64;
enum MaskKind : long { NO_MASK, BOOLEAN, ADDITIVE };

constexpr long rounded(long n, long step) { return (n + step - 1) / step * step; }

template <class T>
struct Constants;
template <>
struct Constants<float> {
  using Bits = std::int32_t;
  static constexpr float infinity = __builtin_inff(), lowest = -87.0f, shift = 0x1.8p23f;
  static constexpr float inverse_log_2 = 0x1.715476p0f, log_2_high = 0x1.62e400p-1f, log_2_low = 0x1.7f7d1cp-20f;
  static constexpr int exponent_bias = 127, mantissa_bits = 23, terms = 8;
  static constexpr float inverse_factorials[] = {1.0f,       1.0f,        1.0f / 2,   1.0f / 6,
                                                 1.0f / 24, 1.0f / 120, 1.0f / 720, 1.0f / 5040};
};
template <>
struct Constants<double> {
  using Bits = std::int64_t;
  static constexpr double infinity = __builtin_inf(), lowest = -708.0, shift = 0x1.8p52;
  static constexpr double inverse_log_2 = 0x1.71547652b82fep0, log_2_high = 0x1.62e42fefa0000p-1,
                          log_2_low = 0x1.cf79abc9e3b3ap-40;
  static constexpr int exponent_bias = 1023, mantissa_bits = 52, terms = 14;
  static constexpr double inverse_factorials[] = {
      1.0,        1.0,         1.0 / 2,      1.0 / 6,       1.0 / 24,       1.0 / 120,       1.0 / 720,
      1.0 / 5040, 1.0 / 40320, 1.0 / 362880, 1.0 / 3628800, 1.0 / 39916800, 1.0 / 479001600, 1.0 / 6227020800.0};
};

// One of the tensors, (batch, rows, columns) after broadcasting; `cpu.py` has the same fields.
constexpr int BATCH_DIMENSIONS = 8;
struct Tensor {
  const void* data;
  long columns, strides[BATCH_DIMENSIONS], row_stride, column_stride;
};

// Missing tensors have no data; so have results that nobody wants. Query i sees key j if low <= j - i <= high.
struct Problem {
  // Sizes of the batch, and how much of each tells groups apart: all of it, or 1.
  long batch[BATCH_DIMENSIONS], grouped[BATCH_DIMENSIONS];
  long heads, groups, slices, chunks, length, keys, low, high, height, threads;
  double scale, softcap;  // No soft-cap is 0.
  Tensor q, k, v, g, q_t, k_t, v_t, g_t, mask, mask_t;
  long mask_kind;
  // Dropout: a weight is kept, times `kept`, if its hash is at least the threshold; a key for each head.
  const std::int64_t* head_keys;
  long threshold;
  double kept;
  // (heads, rows, columns), contiguous; the parts of by_k and by_v that chunks give, if there are several, are (chunks,
  // slices, groups, keys, columns) of a step.
  void *out, *by_q, *by_k, *by_v, *parts_k, *parts_v;
  // (slices, chunks, groups, rows, columns), with one chunk if it has rows, which only one chunk adds to; zeros before.
  void* by_mask;
  long mask_rows, mask_columns;
};

// What one step of a task is about.
struct Place {
  long head, group, slice, chunk;
};
// The head of number `index` in a group.
inline long head_of(const Problem& p, long group, long index) {
  long head = 0, step = 1;
  for (int d = BATCH_DIMENSIONS - 1; d >= 0; --d) {
    long& from = p.grouped[d] == p.batch[d] ? group : index;
    head += from % p.batch[d] * step;
    from /= p.batch[d], step *= p.batch[d];
  }
  return head;
}

// Query rows `start` to `start + count`, padded to `rows`, and the keys that any of them sees, in fours.
struct Panel {
  long start, count, rows, first, last;
};
inline Panel panel_of(const Problem& p, long start) {
  const long count = p.length - start < p.height ? p.length - start : p.height;
  const long from = start + p.low, to = start + count + p.high;
  const long first = from < 0 ? 0 : from > p.keys ? p.keys : from;
  const long last = to > p.keys ? p.keys : to < first ? first : to;
  return {start, count, p.height, first / 4 * 4, first == last ? first / 4 * 4 : rounded(last, 4)};
}

// A tensor's matrix of one head.
template <class T>
struct Matrix {
  const T* data;
  long columns, row_stride, column_stride;
  Matrix(const Problem& p, const Tensor& t, long head)
      : data(static_cast<const T*>(t.data)),
        columns(t.columns),
        row_stride(t.row_stride),
        column_stride(t.column_stride) {
    if (!data) return;
    for (int d = BATCH_DIMENSIONS - 1; d >= 0; --d) {
      data += head % p.batch[d] * t.strides[d];
      head /= p.batch[d];
    }
  }
};

// Hands out pieces of a thread's memory, a cache line apart.
template <class T>
struct Pieces {
  static constexpr long LINE = 64 / sizeof(T);
  T* next;
  T* operator()(long count) {
    T* piece = next;
    next += rounded(count, LINE);
    return piece;
  }
};

// The rows of a panel as they are, and turned; null where there are none.
template <class T>
struct Rows {
  T *plain, *turned;
};

inline std::uint32_t mixed(std::uint32_t x) {
  x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
  x = (x ^ (x >> 13)) * 0xC2B2AE35u;
  return x ^ (x >> 16);
}

#if defined(__x86_64__) && defined(__GNUC__)
namespace v4 {
#define TARGET __attribute__((target("avx512f,avx512bw,avx512cd,avx512dq,avx512vl,avx2,fma,bmi,bmi2")))
#define BYTES 64
#define VECTORS 4
#include "tiles.inc"
#undef TARGET
#undef BYTES
#undef VECTORS
}  // namespace v4
namespace v3 {
#define TARGET __attribute__((target("avx2,fma,bmi,bmi2")))
#define BYTES 32
#define VECTORS 2
#include "tiles.inc"
#undef TARGET
#undef BYTES
#undef VECTORS
}  // namespace v3
#endif
namespace base {
#define TARGET
#define BYTES 16
#define VECTORS 2
#include "tiles.inc"
#undef TARGET
#undef BYTES
#undef VECTORS
}  // namespace base

template <class T>
using Task = void (*)(const Problem&, T*, const Place&);

#define TASK_OF(processor) \
  (moving ? (pulled ? processor::run_task<T, true, true> : processor::run_task<T, true, false>) \
          : (pulled ? processor::run_task<T, false, true> : processor::run_task<T, false, false>))
template <class T>
Task<T> task_for(bool moving, bool pulled) {
#if defined(__x86_64__) && defined(__GNUC__)
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return TASK_OF(v4);
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    return TASK_OF(v3);
#endif
  return TASK_OF(base);
}

// How many numbers a thread's memory has.
template <class T>
long memory_of(const Problem& p) {
  const long lanes = 16, e = rounded(p.q.columns, lanes), f = rounded(p.v.columns, lanes), keys = rounded(p.keys, 4);
  const long pieces = 32 * Pieces<T>::LINE;
  return 3 * keys * (e + f) + p.height * (5 * e + 5 * f + 6 * keys + TILE + 5) + pieces;
}

// Sum what the chunks of a step found for the keys of a slice's head, in their order.
template <class T>
void join(const Problem& p, const Place& place, long columns, const void* parts, void* by) {
  if (!by) return;
  const long size = p.keys * columns, step = p.slices * p.groups * size;
  const T* part = static_cast<const T*>(parts) + (place.slice * p.groups + place.group) * size;
  T* total = static_cast<T*>(by) + place.head * size;
  std::memcpy(total, part, size * sizeof(T));
  for (long chunk = 1; chunk < p.chunks; ++chunk) {
    part += step;
    for (long i = 0; i < size; ++i) total[i] += part[i];
  }
}

template <class T>
void run(const Problem& p, void* memory, bool moving, bool pulled) {
  const Task<T> task = task_for<T>(moving, pulled);
  const long size = rounded(memory_of<T>(p), Pieces<T>::LINE), own_keys = p.groups * p.slices;
  const long tasks = own_keys * p.chunks, shared = p.heads / p.groups, steps = (shared + p.slices - 1) / p.slices;
  // Of a slice's heads the one that a step is about, or none.
  const auto place_of = [&](long i, long step) {
    const long group = i % p.groups, slice = i / p.groups % p.slices, index = slice * steps + step;
    return Place{index < shared ? head_of(p, group, index) : -1, group, slice, i / own_keys};
  };
// Never more threads than have memory, whatever OpenMP is set to.
#pragma omp parallel num_threads(static_cast<int>(p.threads))
  {
    T* own = static_cast<T*>(memory) + size * omp_get_thread_num();
    const auto take = [&](long i, long step) {
      const Place place = place_of(i, step);
      if (place.head >= 0) task(p, own, place);
    };
    if (p.chunks == 1) {
#pragma omp for schedule(dynamic)
      for (long i = 0; i < tasks; ++i)
        for (long step = 0; step < steps; ++step) take(i, step);
    } else {
      for (long step = 0; step < steps; ++step) {
#pragma omp for schedule(dynamic)
        for (long i = 0; i < tasks; ++i) take(i, step);
#pragma omp for
        for (long i = 0; i < own_keys; ++i) {
          const Place place = place_of(i, step);
          if (place.head < 0) continue;
          join<T>(p, place, p.q.columns, p.parts_k, p.by_k);
          join<T>(p, place, p.v.columns, p.parts_v, p.by_v);
        }
      }
    }
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT long hodiff_attention_problem() { return sizeof(Problem); }
EXPORT long hodiff_attention_memory_float(const Problem* p) { return rounded(memory_of<float>(*p), 16); }
EXPORT long hodiff_attention_memory_double(const Problem* p) { return rounded(memory_of<double>(*p), 8); }
EXPORT void hodiff_attention_float(const Problem* p, void* memory, long moving, long pulled) {
  run<float>(*p, memory, moving, pulled);
}
EXPORT void hodiff_attention_double(const Problem* p, void* memory, long moving, long pulled) {
  run<double>(*p, memory, moving, pulled);
}
