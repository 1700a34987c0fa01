// CPU kernels for cross-entropy, in float32 and float64: the cotangent of a tile of logits, and its tangent.
//
// Z is a tile of logits, L the log-sum-exp of each row over all tiles, and P = exp(Z - L). Each row has the cotangents
// g of L, t of the target's logit, and r of the sum of all logits. The cotangent C of Z, and its tangent D, are
//
//   C = g P + r,  plus t at the target;  D = P (g dZ - m) + dr,  plus dt at the target,
//
// where d marks tangents and m = g dL - dg. C and D overwrite Z and dZ, which are not needed any more.

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

// Up to this number of elements, a kernel uses a single thread.
constexpr long SERIAL = 16384;

// e^x = 2^k e^r by the Taylor series of e^r, with x = k log(2) + r and |r| <= log(2)/2. x is a logit minus the
// log-sum-exp, so it is at most 0 up to rounding. The result is zero for x < -87 (float) or x < -708 (double), so that
// it is never subnormal.
INLINE float exponential(float x) {
  const float shift = 0x1.8p23f, in_range = x < -87.0f ? -87.0f : x;
  const float shifted = in_range * 0x1.715476p0f + shift, k = shifted - shift;
  const float r = (in_range - k * 0x1.62e400p-1f) - k * 0x1.7f7d1cp-20f;
  float series = 1.0f / 5040;
  series = series * r + 1.0f / 720;
  series = series * r + 1.0f / 120;
  series = series * r + 1.0f / 24;
  series = series * r + 1.0f / 6;
  series = series * r + 0.5f;
  series = series * r + 1.0f;
  series = series * r + 1.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : series * power;
}

INLINE double exponential(double x) {
  const double shift = 0x1.8p52, in_range = x < -708.0 ? -708.0 : x;
  const double shifted = in_range * 0x1.71547652b82fep0 + shift, k = shifted - shift;
  const double r = (in_range - k * 0x1.62e42fefa0000p-1) - k * 0x1.cf79abc9e3b3ap-40;
  double series = 1.0 / 6227020800;
  series = series * r + 1.0 / 479001600;
  series = series * r + 1.0 / 39916800;
  series = series * r + 1.0 / 3628800;
  series = series * r + 1.0 / 362880;
  series = series * r + 1.0 / 40320;
  series = series * r + 1.0 / 5040;
  series = series * r + 1.0 / 720;
  series = series * r + 1.0 / 120;
  series = series * r + 1.0 / 24;
  series = series * r + 1.0 / 6;
  series = series * r + 0.5;
  series = series * r + 1.0;
  series = series * r + 1.0;
  std::uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -708.0 ? 0.0 : series * power;
}

// z = g e^(z - lse) + r for a row.
template <class T>
INLINE void cotangent(T* z, T lse, T g, T r, long columns) {
#pragma omp simd
  for (long j = 0; j < columns; ++j) z[j] = g * exponential(z[j] - lse) + r;
}

// With p = e^(z - lse), z = g p + r and z_t = p (g z_t - mean) + r_t for a row.
template <class T>
INLINE void curvature(T* z, T* z_t, T lse, T g, T mean, T r, T r_t, long columns) {
#pragma omp simd
  for (long j = 0; j < columns; ++j) {
    const T p = exponential(z[j] - lse);
    z[j] = g * p + r;
    z_t[j] = p * (g * z_t[j] - mean) + r_t;
  }
}

// A plain function for each dtype, which the compiler clones for each processor.
#define FOR_EACH_DTYPE(T)                                                                                       \
  FOR_EACH_PROCESSOR void cotangent_row(T* z, T lse, T g, T r, long columns) { cotangent(z, lse, g, r, columns); } \
  FOR_EACH_PROCESSOR void curvature_row(T* z, T* z_t, T lse, T g, T mean, T r, T r_t, long columns) {           \
    curvature(z, z_t, lse, g, mean, r, r_t, columns);                                                           \
  }
FOR_EACH_DTYPE(float)
FOR_EACH_DTYPE(double)

// The number of a row; zero for a null pointer.
template <class T>
INLINE T at(const T* numbers, long row) { return numbers ? numbers[row] : 0; }

// Overwrite z by C, or z and z_t by C and D. `place` is the target's column in the tile, or negative if the tile does
// not contain it. t, r and their tangents t_t, r_t may be null for zeros.
template <class T>
void cotangents(T* z, const T* lse, const T* g, const T* t, const T* r, const std::int64_t* place, long rows,
                long columns) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long i = 0; i < rows; ++i) {
    T* row = z + i * columns;
    cotangent_row(row, lse[i], g[i], at(r, i), columns);
    if (t && place[i] >= 0) row[place[i]] += t[i];
  }
}

template <class T>
void curvatures(T* z, T* z_t, const T* lse, const T* g, const T* mean, const T* t, const T* r, const T* t_t,
                const T* r_t, const std::int64_t* place, long rows, long columns) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long i = 0; i < rows; ++i) {
    T *row = z + i * columns, *row_t = z_t + i * columns;
    curvature_row(row, row_t, lse[i], g[i], mean[i], at(r, i), at(r_t, i), columns);
    if (place[i] < 0) continue;
    if (t) row[place[i]] += t[i];
    if (t_t) row_t[place[i]] += t_t[i];
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void hodiff_logits_cotangent_float(float* z, const float* lse, const float* g, const float* t, const float* r,
                                          const std::int64_t* place, long rows, long columns) {
  cotangents(z, lse, g, t, r, place, rows, columns);
}
EXPORT void hodiff_logits_curvature_float(float* z, float* z_t, const float* lse, const float* g, const float* mean,
                                          const float* t, const float* r, const float* t_t, const float* r_t,
                                          const std::int64_t* place, long rows, long columns) {
  curvatures(z, z_t, lse, g, mean, t, r, t_t, r_t, place, rows, columns);
}
EXPORT void hodiff_logits_cotangent_double(double* z, const double* lse, const double* g, const double* t, const double* r,
                                           const std::int64_t* place, long rows, long columns) {
  cotangents(z, lse, g, t, r, place, rows, columns);
}
EXPORT void hodiff_logits_curvature_double(double* z, double* z_t, const double* lse, const double* g, const double* mean,
                                           const double* t, const double* r, const double* t_t, const double* r_t,
                                           const std::int64_t* place, long rows, long columns) {
  curvatures(z, z_t, lse, g, mean, t, r, t_t, r_t, place, rows, columns);
}
