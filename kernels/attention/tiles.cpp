// CPU kernels for scaled dot-product attention, its gradient, and the tangents of both, in float32 and float64.
//
// The output is O = P V with the weights P = softmax(S) and the scores S = s Q K^T + M. G is the cotangent of O, and d
// marks tangents. m(t) is the mean of t in each row, weighted by P, and t' = t - m(t). For a panel of query rows and
// the keys that they attend to, a kernel stores
//
//   S,  dS = s (dQ K^T + Q dK^T) + dM,  C = G V^T,  E = dG V^T + G dV^T,
// and computes elementwise the tangent dP of P, the cotangent A of S, and its tangent dA:
//
//   dP = P dS',  A = P C',  dA = P W'  with  W = E + dS' C'.
//
// The results without tangents are
//
//   the output O, and the gradients s A K, s A^T Q, P^T G and A with respect to Q, K, V and M;
//
// with tangents, they are the tangents of these:
//
//   dP V + P dV,  s (dA K + A dK),  s (dA^T Q + A^T dQ),  dP^T G + P^T dG,  dA.
//
// O takes 2 matrix products, the gradient 5, and all tangents together 14. The products of a panel are computed before
// the next panel, so no matrix of the size of P is ever stored.
//
// Dropout multiplies P elementwise by constant factors in its products with V and G, and therefore C and E as well.
//
// A soft-cap c replaces X = s Q K^T in S by c t with t = tanh(X / c), so that dS = (1 - t^2) dX + dM. The cotangent of
// X is (1 - t^2) A, and its tangent is (1 - t^2) dA - (2 t / c) (1 - t^2) dX A.
//
// The gradient of a mask that is broadcast over heads is a sum over these heads. The heads that share a matrix of the
// mask's gradient form a group; if that gradient is not needed, each head is a group. A task processes the heads of a
// group one after another, for a chunk of the query rows. If there are too few chunks for all threads, the heads of a
// group are also divided into slices, each with its own sum.

#ifdef _OPENMP
#include <omp.h>
#endif

#include <cstdint>
#include <cstring>

namespace {

#ifndef _OPENMP
constexpr int omp_get_thread_num() { return 0; }
#endif

// Number of keys in a tile, the unit of a matrix product. The caller chooses the number of rows of a panel (`height`).
constexpr long TILE = 64;
enum MaskKind : long { NO_MASK, BOOLEAN, ADDITIVE };

constexpr long rounded(long n, long step) { return (n + step - 1) / step * step; }

// Constants of the exponential function: range reduction, the floating-point format, and Taylor coefficients.
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

// A tensor (batch, rows, columns) after broadcasting, by address and strides. `problem.py` declares the same fields.
constexpr int BATCH_DIMENSIONS = 8;
struct Tensor {
  const void* data;
  long columns, strides[BATCH_DIMENSIONS], row_stride, column_stride;
};

// All arguments of a call; `problem.py` declares the same fields. Pointers are null for missing tensors and for results
// that are not needed. Query i attends to key j only if low <= j - i <= high.
struct Problem {
  // Sizes of the batch, and of the batch of groups: in each dimension the same size, or 1 if a group spans it.
  long batch[BATCH_DIMENSIONS], grouped[BATCH_DIMENSIONS];
  long heads, groups, slices, chunks, length, keys, low, high, height, threads;
  double scale, softcap;  // 0 for no soft-cap
  Tensor q, k, v, g, q_t, k_t, v_t, g_t, mask, mask_t;
  long mask_kind;
  // Dropout: a weight is multiplied by `kept` if its hash is at least `threshold`, else by 0. Each head has a hash key.
  const std::int64_t* head_keys;
  long threshold;
  double kept;
  // Results (heads, rows, columns), contiguous. If there are several chunks, parts_k and parts_v (chunks, slices,
  // groups, keys, columns) are each chunk's part of by_k and by_v for the heads of the current step.
  void *out, *by_q, *by_k, *by_v, *parts_k, *parts_v;
  // (slices, chunks, groups, mask_rows, mask_columns), initialized to zero. The size of `chunks` is 1 if mask_rows > 1,
  // because then only one chunk adds to a row.
  void* by_mask;
  long mask_rows, mask_columns;
};

// The part of the problem that a step of a task computes.
struct Place {
  long head, group, slice, chunk;
};
// The index of a head, given its group and its index within the group.
inline long head_of(const Problem& p, long group, long index) {
  long head = 0, step = 1;
  for (int d = BATCH_DIMENSIONS - 1; d >= 0; --d) {
    long& from = p.grouped[d] == p.batch[d] ? group : index;
    head += from % p.batch[d] * step;
    from /= p.batch[d], step *= p.batch[d];
  }
  return head;
}

// Query rows `start` to `start + count`, padded to `rows`, and the range `first` to `last` of the keys that any of them
// attends to, rounded outwards to multiples of 4.
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

// The matrix of one head of a tensor; `data` is null for a missing tensor.
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

// Allocates buffers one after another in a thread's workspace, aligned to cache lines.
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

// The rows of a panel of a tensor and their transpose; null for a missing tensor.
template <class T>
struct Rows {
  T *plain, *turned;
};

// The finalizer of the 32-bit MurmurHash3.
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
// The version of run_task for the present processor; for `moving` and `pulled`, see run_task.
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

// The size of a thread's workspace, in elements.
template <class T>
long memory_of(const Problem& p) {
  const long lanes = 16, e = rounded(p.q.columns, lanes), f = rounded(p.v.columns, lanes), keys = rounded(p.keys, 4);
  const long pieces = 32 * Pieces<T>::LINE;
  return 3 * keys * (e + f) + p.height * (5 * e + 5 * f + 6 * keys + TILE + 5) + pieces;
}

// Sum the parts of all chunks of a step, in order, to the gradient with respect to the keys or values of one head.
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

// Compute all results that the problem asks for. `memory` has a workspace for each of the p.threads threads.
template <class T>
void run(const Problem& p, void* memory, bool moving, bool pulled) {
  const Task<T> task = task_for<T>(moving, pulled);
  const long size = rounded(memory_of<T>(p), Pieces<T>::LINE), own_keys = p.groups * p.slices;
  const long tasks = own_keys * p.chunks, shared = p.heads / p.groups, steps = (shared + p.slices - 1) / p.slices;
  // The head of a slice that a step computes, or -1 if the slice has fewer heads than steps.
  const auto place_of = [&](long i, long step) {
    const long group = i % p.groups, slice = i / p.groups % p.slices, index = slice * steps + step;
    return Place{index < shared ? head_of(p, group, index) : -1, group, slice, i / own_keys};
  };
// Each thread needs a workspace, so the number of threads does not follow OpenMP's setting.
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

// The size of Problem in bytes, and of the workspace of a thread in elements.
EXPORT long hodiff_attention_problem() { return sizeof(Problem); }
EXPORT long hodiff_attention_memory_float(const Problem* p) { return rounded(memory_of<float>(*p), 16); }
EXPORT long hodiff_attention_memory_double(const Problem* p) { return rounded(memory_of<double>(*p), 8); }
EXPORT void hodiff_attention_float(const Problem* p, void* memory, long moving, long pulled) {
  run<float>(*p, memory, moving, pulled);
}
EXPORT void hodiff_attention_double(const Problem* p, void* memory, long moving, long pulled) {
  run<double>(*p, memory, moving, pulled);
}
