// Fused CPU kernels for float32, some also for float64: elementwise functions and their vector-Jacobian products,
// rows of softmax and normalization, ReLU with its mask, collapsed Taylor series, transposes and symmetric parts.
//
// Activation functions are computed in double, so that plain formulas suffice: double keeps the digits that float32
// would lose to cancellation in the tails, and intermediate results do not overflow. Results are accurate to about half
// a unit in the last place of float32. The compiler vectorizes the loops, and compiles them for several processors
// (FOR_EACH_PROCESSOR); the version for the present processor is chosen when the library is loaded.

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE inline __attribute__((always_inline))

namespace {

// Number of elements in a block, the unit of work of a thread.
constexpr long BLOCK = 2048;
// Up to this number of elements, a kernel uses a single thread.
constexpr long SERIAL = 16384;

// Clamp x from below, from above, or to [-bound, bound]. NaN stays NaN.
INLINE double at_least(double x, double low) { return low > x ? low : x; }
INLINE double at_most(double x, double high) { return high < x ? high : x; }
INLINE double cut(double x, double bound) { return at_most(at_least(x, -bound), bound); }

// e^x for |x| <= 700, with a relative error below 5e-12: 2^k p(r) for x = k log(2) + r with an integer k, where the
// polynomial p is a Chebyshev fit of e^r on [-log(2)/2, log(2)/2].
INLINE double exponential(double x) {
  const double shift = 0x1.8p52;  // Adding it rounds to an integer, stored in the low bits of the mantissa.
  const double shifted = x * 0x1.71547652b82fep0 + shift;
  const double k = shifted - shift;
  const double r = (x - k * 0x1.62e42fefa0000p-1) - k * 0x1.cf79abc9e3b3ap-40;
  double p = 0x1.a113532aeb65bp-16;
  p = p * r + 0x1.a151b9b9f9468p-13;
  p = p * r + 0x1.6c168572ec67ep-10;
  p = p * r + 0x1.1110c613ed8f1p-7;
  p = p * r + 0x1.5555555c8b81bp-5;
  p = p * r + 0x1.555555675e3d0p-3;
  p = p * r + 0.5;
  p = p * r + 1.0;
  p = p * r + 1.0;
  std::uint64_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 1023) << 52;
  double power;
  std::memcpy(&power, &bits, sizeof power);
  return p * power;
}

// The sigmoid function sigma(z) = 1 / (1 + e^-z) and related functions, for |z| <= 700. The range of double allows one
// formula for both tails.
struct Logistic {
  double z, e, d;  // e = e^-z and d = 1 / (1 + e)
  INLINE explicit Logistic(double argument) : z(argument), e(exponential(-argument)), d(1.0 / (1.0 + e)) {}
  INLINE double value() const { return d; }          // sigma(z)
  INLINE double reflected() const { return e * d; }  // sigma(-z)
  INLINE double bell() const { return e * d * d; }   // sigma(z) sigma(-z)
  INLINE double half_tanh() const {                  // tanh(z / 2), by its Taylor series near 0
    const double square = z * z;
    const double near = 0.5 * z * (1.0 - square * (1.0 / 12 - square * (1.0 / 120)));
    const double far = (1.0 - e) * d;
    return square < 1e-4 ? near : far;
  }
};

// sigma(z) and its first and second derivatives.
INLINE double sigmoid(double z) { return Logistic(cut(z, 700.0)).value(); }
INLINE double bell(double z) { return Logistic(cut(z, 700.0)).bell(); }
INLINE double bell_slope(double z) {
  const Logistic l(cut(z, 700.0));
  return -l.bell() * l.half_tanh();
}

// SiLU, x sigma(x), and its first and second derivatives. The factor x is clamped from below to avoid -infinity * 0.
INLINE double silu(double x) { return at_least(x, -700.0) * Logistic(cut(x, 700.0)).value(); }
INLINE double silu_slope(double x) {
  const Logistic l(cut(x, 700.0));
  return l.value() * (1.0 + l.z * l.reflected());
}
INLINE double silu_curvature(double x) {
  const Logistic l(cut(x, 700.0));
  return l.bell() * (2.0 - l.z * (1.0 - l.e) * l.d);
}

// The standard normal density and distribution function Phi. x is clamped to [-16, 16], because the smaller tail is
// below the smallest float32 outside. Phi(-u) = e^(-u^2/2) q / (u + 4) for u >= 0, where q is a smooth function of
// 1 / (u + 4), computed by a Chebyshev fit with a relative error below 4e-9.
struct Normal {
  double x, bell;
  INLINE explicit Normal(double argument) : x(cut(argument, 16.0)), bell(exponential(-0.5 * x * x)) {}
  INLINE double density() const { return 0.3989422804014327 * bell; }
  INLINE double distribution() const {
    const double inverse = 1.0 / (__builtin_fabs(x) + 4.0);
    const double s = 10.0 * inverse - 1.5;
    double q = -0x1.6476df79d4a55p-18;
    q = q * s + 0x1.1f5e7b3402e1ep-16;
    q = q * s + 0x1.5aa63457514a2p-14;
    q = q * s - 0x1.dd95a89528e74p-13;
    q = q * s - 0x1.774b1d0ea888ap-10;
    q = q * s + 0x1.67e092f137cc2p-11;
    q = q * s + 0x1.b70002ecfae24p-6;
    q = q * s + 0x1.f177d9a6f05d0p-4;
    q = q * s + 0x1.50e415235ab76p-2;
    q = q * s + 0x1.42677ef1decdap-1;
    q = q * s + 0x1.c9b2a047e5047p-1;
    const double tail = bell * q * inverse;
    const double upper = x < 0 ? 0.0 : 1.0;
    return upper + (1.0 - 2.0 * upper) * tail;
  }
};

// GELU, x Phi(x), and its first and second derivatives.
INLINE double gelu(double x) { return at_least(x, -16.0) * Normal(x).distribution(); }
INLINE double gelu_slope(double x) {
  const Normal normal(x);
  return normal.distribution() + normal.x * normal.density();
}
INLINE double gelu_curvature(double x) {
  const Normal normal(x);
  return normal.density() * (2.0 - normal.x * normal.x);
}

// GELU with the tanh approximation: x sigma(v) for v = c (x + d x^3). Its derivatives are
//   sigma(v) + x v' sigma'(v)  and  2 v' sigma'(v) + x (v'' sigma'(v) + v'^2 sigma''(v)),
// with v' in `first` and v'' in `second`. x is clamped to [-18, 18], because sigma(v) is 0 or 1 in float32 outside.
struct Cubic {
  double x, v, first, second;
  INLINE explicit Cubic(double argument) : x(cut(argument, 18.0)) {
    const double c = 1.5957691216057308, d = 0.044715, square = x * x;
    v = c * x * (1.0 + d * square);
    first = c * (1.0 + 3.0 * d * square);
    second = 6.0 * c * d * x;
  }
};
INLINE double gelu_tanh(double x) { return at_least(x, -18.0) * Logistic(Cubic(x).v).value(); }
INLINE double gelu_tanh_slope(double x) {
  const Cubic cubic(x);
  const Logistic l(cubic.v);
  return l.value() * (1.0 + cubic.x * cubic.first * l.reflected());
}
INLINE double gelu_tanh_curvature(double x) {
  const Cubic cubic(x);
  const Logistic l(cubic.v);
  const double bend = cubic.second - cubic.first * cubic.first * (1.0 - l.e) * l.d;
  return l.bell() * (2.0 * cubic.first + cubic.x * bend);
}

// The factor w of Mish, x w: w = tanh(log(1 + n)) = n (n + 2) / D for n = e^x and D = n (n + 2) + 2, with derivatives
// w' = 4 n (n + 1) / D^2 and w'' = 4 n (2 + 2 n - 3 n^2 - 2 n^3) / D^3. Callers clamp x at 60, because w' and w'' are
// below the smallest float32 beyond.
struct Gate {
  double n, inverse;
  INLINE explicit Gate(double x) {
    n = exponential(x);
    inverse = 1.0 / (n * (n + 2.0) + 2.0);
  }
  INLINE double value() const { return n * (n + 2.0) * inverse; }
  INLINE double slope() const { return 4.0 * n * (n + 1.0) * inverse * inverse; }
  INLINE double curvature() const {
    return 4.0 * n * inverse * inverse * inverse * (2.0 + n * (2.0 - n * (3.0 + 2.0 * n)));
  }
};
INLINE double mish(double x) {
  x = at_least(x, -200.0);
  return x * Gate(at_most(x, 60.0)).value();
}
INLINE double mish_slope(double x) {
  x = at_most(at_least(x, -200.0), 60.0);
  const Gate gate(x);
  return gate.value() + x * gate.slope();
}
INLINE double mish_curvature(double x) {
  x = at_most(at_least(x, -200.0), 60.0);
  const Gate gate(x);
  return 2.0 * gate.slope() + x * gate.curvature();
}

// Functions f of one argument, each with two loops: f_of computes f(x), and f_times computes by * f(x).
#define FORMULAS(each)                                                                                      \
  each(sigmoid) each(bell) each(bell_slope) each(silu) each(silu_slope) each(silu_curvature) each(gelu)     \
  each(gelu_slope) each(gelu_curvature) each(gelu_tanh) each(gelu_tanh_slope) each(gelu_tanh_curvature)     \
  each(mish) each(mish_slope) each(mish_curvature)

#define DEFINE_LOOPS(f)                                                                                     \
  FOR_EACH_PROCESSOR void f##_of(const float* x, const float*, float* out, long n) {                        \
    for (long i = 0; i < n; ++i) out[i] = static_cast<float>(f(x[i]));                                      \
  }                                                                                                         \
  FOR_EACH_PROCESSOR void f##_times(const float* x, const float* by, float* out, long n) {                  \
    for (long i = 0; i < n; ++i) out[i] = static_cast<float>(by[i] * f(x[i]));                              \
  }
FORMULAS(DEFINE_LOOPS)

// Pairs of a function f and its derivative. f_pullback is the vector-Jacobian product of by * f(x), for a cotangent c.
#define SLOPES(each)                                                                                        \
  each(sigmoid, bell) each(bell, bell_slope) each(silu, silu_slope) each(silu_slope, silu_curvature)        \
  each(gelu, gelu_slope) each(gelu_slope, gelu_curvature) each(gelu_tanh, gelu_tanh_slope)                  \
  each(gelu_tanh_slope, gelu_tanh_curvature) each(mish, mish_slope) each(mish_slope, mish_curvature)        \
  each(gate, bell)

#define DEFINE_PULLBACK(f, slope)                                                                           \
  FOR_EACH_PROCESSOR void f##_pullback(const float* x, const float* by, const float* c, float* by_by,       \
                                       float* by_x, long n) {                                               \
    for (long i = 0; i < n; ++i) {                                                                          \
      const double value = f(x[i]), derivative = slope(x[i]);                                               \
      by_by[i] = static_cast<float>(c[i] * value);                                                          \
      by_x[i] = static_cast<float>(static_cast<double>(c[i]) * by[i] * derivative);                         \
    }                                                                                                       \
  }
// With by = x, gate_pullback differentiates y = x sigma(z), z = beta x: by_by = c dy/dx, and x by_x = c dy/dbeta.
INLINE double gate(double z) { return silu_slope(z); }
SLOPES(DEFINE_PULLBACK)

// out = x sigma(z) for z = beta x. x is clamped from below to avoid -infinity * 0.
FOR_EACH_PROCESSOR void gate_times(const float* z, const float* x, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = static_cast<float>(at_least(x[i], -3.4028234663852886e38) * sigmoid(z[i]));
}

// Vector-Jacobian product of (c, x, z) -> (c f(z), c x b(z)) with f = silu_slope and b = bell, for the cotangents u, w:
//   by_c = u f(z) + w x b(z),  by_x = w c b(z),  by_z = c (u f'(z) + w x b'(z)).
// Outputs must not overlap any other array (__restrict): there are too many pointers for the compiler to check them for
// overlap at run time.
FOR_EACH_PROCESSOR void gate_curvature(const float* u, const float* w, const float* c, const float* x, const float* z,
                                       float* __restrict by_c, float* __restrict by_x, float* __restrict by_z, long n) {
  for (long i = 0; i < n; ++i) {
    const Logistic l(cut(z[i], 700.0));
    const double b = l.bell(), t = (1.0 - l.e) * l.d, wx = static_cast<double>(w[i]) * x[i];
    by_c[i] = static_cast<float>(u[i] * (l.value() * (1.0 + l.z * l.reflected())) + wx * b);
    by_x[i] = static_cast<float>(static_cast<double>(w[i]) * c[i] * b);
    by_z[i] = static_cast<float>(c[i] * b * (u[i] * (2.0 - l.z * t) - wx * t));
  }
}

struct Entry {
  const char* name;
  void (*of)(const float*, const float*, float*, long);
  void (*times)(const float*, const float*, float*, long);
};
#define LIST_LOOPS(f) {#f, f##_of, f##_times},
const Entry TABLE[] = {FORMULAS(LIST_LOOPS){"gate", sigmoid_of, gate_times}};
constexpr long ENTRIES = sizeof TABLE / sizeof TABLE[0];

struct Pullback {
  const char* name;
  void (*run)(const float*, const float*, const float*, float*, float*, long);
};
#define LIST_PULLBACK(f, slope) {#f, f##_pullback},
const Pullback PULLBACKS[] = {SLOPES(LIST_PULLBACK)};
constexpr long PULLBACK_ENTRIES = sizeof PULLBACKS / sizeof PULLBACKS[0];

// e^x for x <= 0 in float32, accurate to about one unit in the last place; zero for x < -87.
INLINE float exponential_below(float x) {
  const float shift = 0x1.8p23f;
  const float cut_x = x < -87.0f ? -87.0f : x;
  const float shifted = cut_x * 0x1.715476p0f + shift;
  const float k = shifted - shift;
  const float r = (cut_x - k * 0x1.62e400p-1f) - k * 0x1.7f7d1cp-20f;
  float p = 0x1.6d113cp-10f;
  p = p * r + 0x1.120ba2p-7f;
  p = p * r + 0x1.555518p-5f;
  p = p * r + 0x1.5554dcp-3f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  std::uint32_t bits;
  std::memcpy(&bits, &shifted, sizeof bits);
  bits = (bits + 127) << 23;
  float power;
  std::memcpy(&power, &bits, sizeof power);
  return x < -87.0f ? 0.0f : p * power;
}

// Softmax is computed in float32. Sums over a row are float32 within pieces of PIECE elements; the sums of the pieces
// are added in double.
constexpr long PIECE = 256;

INLINE float bounded_by(float x, float bound) {
  const float low = x < -bound ? -bound : x;
  return low > bound ? bound : low;
}
// The largest element, clamped to [-bound, bound]. NaN is ignored.
FOR_EACH_PROCESSOR float largest(const float* x, long n, float bound) {
  float top = -bound;
#pragma omp simd reduction(max : top)
  for (long i = 0; i < n; ++i) top = x[i] > top ? x[i] : top;
  return bounded_by(top, bound);
}

// out = e^(x - top), with x clamped to [-bound, bound]. Returns the sum of out.
FOR_EACH_PROCESSOR double exponentials(const float* x, float top, float* out, long n, float bound) {
  double total = 0.0;
  for (long start = 0; start < n; start += PIECE) {
    const long stop = start + PIECE < n ? start + PIECE : n;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = start; i < stop; ++i) sum += out[i] = exponential_below(bounded_by(x[i], bound) - top);
    total += sum;
  }
  return total;
}

FOR_EACH_PROCESSOR double sum_of_exponentials(const float* x, float top, long n) {
  double total = 0.0;
  for (long start = 0; start < n; start += PIECE) {
    const long stop = start + PIECE < n ? start + PIECE : n;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = start; i < stop; ++i) sum += exponential_below(x[i] - top);
    total += sum;
  }
  return total;
}

FOR_EACH_PROCESSOR double inner(const float* a, const float* b, long n) {
  double total = 0.0;
  for (long start = 0; start < n; start += PIECE) {
    const long stop = start + PIECE < n ? start + PIECE : n;
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (long i = start; i < stop; ++i) sum += a[i] * b[i];
    total += sum;
  }
  return total;
}

// scaled_by: out *= factor. centred_by: out *= factor (v - mean).
FOR_EACH_PROCESSOR void scaled_by(float factor, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] *= factor;
}
FOR_EACH_PROCESSOR void centred_by(float factor, const float* v, float mean, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] *= factor * (v[i] - mean);
}

// log(sum(e^x)). If the largest element is infinite, returns NaN if the row contains NaN, else that element.
float logsumexp_row(const float* x, long n) {
  const float infinity = __builtin_inff(), top = largest(x, n, infinity);
  if (top != infinity && top != -infinity) return static_cast<float>(top + std::log(sum_of_exponentials(x, top, n)));
  for (long i = 0; i < n; ++i)
    if (x[i] != x[i]) return x[i];
  return top;
}

void softmax_row(const float* x, float scale, float* out, long n, float bound) {
  const double sum = exponentials(x, largest(x, n, bound), out, n, bound);
  scaled_by(static_cast<float>(scale / sum), out, n);
}

void product_row(const float* x, float scale, const float* v, float* out, float* mean, long n, float bound) {
  const double sum = exponentials(x, largest(x, n, bound), out, n, bound);
  const float average = n ? static_cast<float>(inner(out, v, n) / sum) : 0.0f;
  if (mean) *mean = average;
  centred_by(static_cast<float>(scale / sum), v, average, out, n);
}

// out = p (v - <p, v>).
FOR_EACH_PROCESSOR void weighted_row(const float* p, const float* v, float* out, long n) {
  const float mean = static_cast<float>(inner(p, v, n));
  for (long i = 0; i < n; ++i) out[i] = p[i] * (v[i] - mean);
}

// Vector-Jacobian product of weighted_row for the cotangent u of out:
//   by_v = p (u - <p, u>),  by_p = u (v - <p, v>) - <p, u> v.
FOR_EACH_PROCESSOR void weighted_pullback_row(const float* p, const float* v, const float* u, float* by_p, float* by_v,
                                              long n) {
  const float mean = static_cast<float>(inner(p, v, n)), other = static_cast<float>(inner(p, u, n));
  for (long i = 0; i < n; ++i) {
    by_p[i] = u[i] * (v[i] - mean) - other * v[i];
    by_v[i] = p[i] * (u[i] - other);
  }
}

// For p = softmax(scores), with the tangent s of the scores, the cotangent c of p and the tangent e of c: the tangent
// by_s of p, the cotangent by_c of the scores, and its tangent by_e. With t' = t - <p, t> and w = e + s' c',
//   by_s = p s',  by_c = p c',  by_e = p w'.
// Outputs must not overlap any other array.
FOR_EACH_PROCESSOR void curvature_row(const float* p, const float* s, const float* c, const float* e,
                                      float* __restrict by_s, float* __restrict by_c, float* __restrict by_e, long n) {
  const float mean_s = static_cast<float>(inner(p, s, n)), mean_c = static_cast<float>(inner(p, c, n));
  for (long i = 0; i < n; ++i) {
    const float centred_s = s[i] - mean_s, centred_c = c[i] - mean_c;
    by_s[i] = p[i] * centred_s;
    by_c[i] = p[i] * centred_c;
    by_e[i] = e[i] + centred_s * centred_c;
  }
  const float mean_w = static_cast<float>(inner(p, by_e, n));
  for (long i = 0; i < n; ++i) by_e[i] = p[i] * (by_e[i] - mean_w);
}

// Vector-Jacobian product of the backward pass of a normalized row y = w x^ + b. The backward pass maps the cotangent g
// of y to the gradients of x, w and b; u, a and c are the cotangents of these gradients. With the mean m over the row,
// x^ = r (x - m(x)), r = 1 / sqrt(m((x - m(x))^2) + eps), P t = t - m(t) - x^ m(t x^), p = g w and q = g a,
//   by_g = w r P u + a x^ + c,  by_x = -r^2 (x^ m(u P p) + m(p x^) P u + m(u x^) P p) + r P q,  by_w += g r P u.
// If the row is not centred (RMS normalization), the terms m(x) and m(t) are omitted.
FOR_EACH_PROCESSOR void normalization_row(const float* __restrict x, const float* __restrict g,
                                          const float* __restrict u, const float* __restrict w,
                                          const float* __restrict a, const float* __restrict c, float* __restrict by_g,
                                          float* __restrict by_x, double* __restrict by_w, long n, double eps,
                                          bool centred) {
  double total = 0.0, square = 0.0;
  if (centred) {
#pragma omp simd reduction(+ : total)
    for (long i = 0; i < n; ++i) total += x[i];
  }
  const double m = total / n;
#pragma omp simd reduction(+ : square)
  for (long i = 0; i < n; ++i) square += (x[i] - m) * (x[i] - m);
  const double r = 1.0 / std::sqrt(square / n + eps);

  double u_1 = 0.0, p_1 = 0.0, q_1 = 0.0, u_x = 0.0, p_x = 0.0, q_x = 0.0, u_p = 0.0;
#pragma omp simd reduction(+ : u_1, p_1, q_1, u_x, p_x, q_x, u_p)
  for (long i = 0; i < n; ++i) {
    const double h = (x[i] - m) * r, v = u[i], p = double(g[i]) * w[i], q = double(g[i]) * a[i];
    u_1 += v;
    p_1 += p;
    q_1 += q;
    u_x += v * h;
    p_x += p * h;
    q_x += q * h;
    u_p += v * p;
  }
  const double share = 1.0 / n, share_of_mean = centred ? share : 0.0;
  u_x *= share, p_x *= share, q_x *= share;
  u_p = u_p * share - p_1 * share_of_mean * u_1 * share - p_x * u_x;  // m(u P p)
  u_1 *= share_of_mean, p_1 *= share_of_mean, q_1 *= share_of_mean;
  for (long i = 0; i < n; ++i) {
    const double h = (x[i] - m) * r, p = double(g[i]) * w[i], q = double(g[i]) * a[i];
    const double pu = u[i] - u_1 - h * u_x, pp = p - p_1 - h * p_x, pq = q - q_1 - h * q_x, d = r * pu;
    by_g[i] = static_cast<float>(w[i] * d + a[i] * h + c[i]);
    by_x[i] = static_cast<float>(r * pq - r * r * (h * u_p + p_x * pu + u_x * pp));
    by_w[i] += g[i] * d;
  }
}

FOR_EACH_PROCESSOR void add_relu_block(const float* x, const float* y, float* out, std::uint8_t* mask, long n) {
  for (long i = 0; i < n; ++i) {
    const float sum = x[i] + y[i];
    out[i] = sum < 0 ? 0 : sum;  // keeps NaN
    mask[i] = !(sum <= 0);
  }
}
FOR_EACH_PROCESSOR void relu_block(const float* x, float* out, std::uint8_t* mask, long n) {
  for (long i = 0; i < n; ++i) {
    out[i] = x[i] < 0 ? 0 : x[i];
    mask[i] = !(x[i] <= 0);
  }
}
FOR_EACH_PROCESSOR void masked_block(const float* v, const std::uint8_t* mask, float* out, long n) {
  for (long i = 0; i < n; ++i) out[i] = mask[i] ? v[i] : 0;
}

// Replace a tile of a matrix on or below the diagonal, and the transpose of its mirror image, by their mean. `stride`
// is the leading dimension of the matrix. `report` accumulates the largest difference of the two, the largest magnitude
// in either, and a sum of zeros that becomes NaN at NaN or infinity, because maxima ignore NaN.
constexpr long TILE = 32;

#define DEFINE_AVERAGE(T)                                                                                   \
  FOR_EACH_PROCESSOR void average_tile(T* lower, T* upper, long rows, long columns, long stride, T* report) { \
    T mirrored[TILE][TILE];                                                                                 \
    for (long j = 0; j < columns; ++j)                                                                      \
      for (long i = 0; i < rows; ++i) mirrored[i][j] = upper[j * stride + i];                               \
    T gap = report[0], size = report[1], poison = report[2];                                                \
    for (long i = 0; i < rows; ++i) {                                                                       \
      T* row = lower + i * stride;                                                                          \
      T* other = mirrored[i];                                                                               \
      SIMD_MAXIMA                                                                                           \
      for (long j = 0; j < columns; ++j) {                                                                  \
        const T a = row[j], b = other[j];                                                                   \
        const T distance = a < b ? b - a : a - b, first = a < 0 ? -a : a, second = b < 0 ? -b : b;          \
        gap = distance > gap ? distance : gap;                                                              \
        size = first > size ? first : size;                                                                 \
        size = second > size ? second : size;                                                               \
        poison += 0 * (a + b);                                                                              \
        other[j] = row[j] = (a + b) / 2;                                                                    \
      }                                                                                                     \
    }                                                                                                       \
    for (long j = 0; j < columns; ++j)                                                                      \
      for (long i = 0; i < rows; ++i) upper[j * stride + i] = mirrored[i][j];                               \
    report[0] = gap, report[1] = size, report[2] = poison;                                                  \
  }
#define SIMD_MAXIMA _Pragma("omp simd reduction(max : gap, size) reduction(+ : poison)")
DEFINE_AVERAGE(float)
DEFINE_AVERAGE(double)

template <class T>
void average_with_transpose(T* a, long n, long stride, T* report) {
  const long tiles = (n + TILE - 1) / TILE;
  report[0] = report[1] = report[2] = 0;
#pragma omp parallel for schedule(dynamic) if (n * n > SERIAL)
  for (long tile = 0; tile < tiles; ++tile) {
    T found[3] = {0, 0, 0};
    const long i = tile * TILE, rows = n - i < TILE ? n - i : TILE;
    for (long j = 0; j <= i; j += TILE)
      average_tile(a + i * stride + j, a + j * stride + i, rows, n - j < TILE ? n - j : TILE, stride, found);
#pragma omp critical
    {
      report[0] = found[0] > report[0] ? found[0] : report[0];
      report[1] = found[1] > report[1] ? found[1] : report[1];
      report[2] += found[2];
    }
  }
}

// Transpose a block of rows of a matrix with few columns; `stride` is the leading dimension of the result.
FOR_EACH_PROCESSOR void turn_block(const float* x, float* out, long rows, long columns, long stride) {
  for (long j = 0; j < columns; ++j)
    for (long i = 0; i < rows; ++i) out[j * stride + i] = x[i * columns + j];
}

// An elementwise function f of a collapsed Taylor series of order 2, with a = f' and b = f''/2 at its value. u has the
// first coefficients, one row per direction with the leading dimension `stride`; w is the sum over directions of the
// second coefficients, and may be null for zero. For each direction, first = a u; and last = a w + b sum(u^2).
template <class T>
INLINE void collapsed_part(const T* a, const T* b, const T* u, const T* w, T* first, T* last, long rows, long stride,
                           long count) {
  T sums[BLOCK];
  for (long i = 0; i < count; ++i) sums[i] = 0;
  for (long row = 0; row < rows; ++row) {
    const T* from = u + row * stride;
    T* to = first + row * stride;
    for (long i = 0; i < count; ++i) {
      const T x = from[i];
      to[i] = a[i] * x;
      sums[i] += x * x;
    }
  }
  if (w)
    for (long i = 0; i < count; ++i) last[i] = a[i] * w[i] + b[i] * sums[i];
  else
    for (long i = 0; i < count; ++i) last[i] = b[i] * sums[i];
}
FOR_EACH_PROCESSOR void collapsed_block(const float* a, const float* b, const float* u, const float* w, float* first,
                                        float* last, long rows, long stride, long count) {
  collapsed_part(a, b, u, w, first, last, rows, stride, count);
}
FOR_EACH_PROCESSOR void collapsed_block(const double* a, const double* b, const double* u, const double* w,
                                        double* first, double* last, long rows, long stride, long count) {
  collapsed_part(a, b, u, w, first, last, rows, stride, count);
}
template <class T>
void collapsed(const T* a, const T* b, const T* u, const T* w, T* first, T* last, long rows, long n) {
  if (n == 0) return;
  const long blocks = (n + BLOCK - 1) / BLOCK;
  // Few elements may have many directions: divide them into smaller blocks, so that more threads have work.
  const long size = blocks > 7 ? BLOCK : (n + 7) / 8;
#pragma omp parallel for schedule(static) if (n * rows > SERIAL)
  for (long i = 0; i < n; i += size)
    collapsed_block(a + i, b + i, u + i, w ? w + i : nullptr, first + i, last + i, rows, n, n - i < size ? n - i : size);
}

// Call work(start, count) for each block of n elements, in parallel.
template <class Work>
void in_blocks(long n, Work work) {
  const long blocks = (n + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) if (n > SERIAL)
  for (long block = 0; block < blocks; ++block) {
    const long start = block * BLOCK;
    work(start, n - start < BLOCK ? n - start : BLOCK);
  }
}

}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT long hodiff_formulas() { return ENTRIES; }
EXPORT const char* hodiff_formula(long index) { return TABLE[index].name; }

// out = f(x), or by * f(x) if `by` is not null, for function `index` of TABLE; out may be x or by.
EXPORT void hodiff_elementwise(long index, const float* x, const float* by, float* out, long n) {
  const auto loop = by ? TABLE[index].times : TABLE[index].of;
  in_blocks(n, [=](long start, long count) { loop(x + start, by ? by + start : nullptr, out + start, count); });
}

EXPORT long hodiff_pullbacks() { return PULLBACK_ENTRIES; }
EXPORT const char* hodiff_pullback_formula(long index) { return PULLBACKS[index].name; }

// Vector-Jacobian product of by * f(x) for the cotangent c and function `index` of PULLBACKS:
//   by_by = c f(x),  by_x = c by f'(x).
EXPORT void hodiff_pullback(long index, const float* x, const float* by, const float* c, float* by_by, float* by_x,
                            long n) {
  const auto run = PULLBACKS[index].run;
  in_blocks(n, [=](long start, long count) {
    run(x + start, by + start, c + start, by_by + start, by_x + start, count);
  });
}

// See gate_curvature.
EXPORT void hodiff_gate_curvature(const float* u, const float* w, const float* c, const float* x, const float* z,
                                  float* by_c, float* by_x, float* by_z, long n) {
  in_blocks(n, [=](long i, long count) {
    gate_curvature(u + i, w + i, c + i, x + i, z + i, by_c + i, by_x + i, by_z + i, count);
  });
}

// out = log(sum(exp(x))) for each row.
EXPORT void hodiff_logsumexp(const float* x, float* out, long rows, long columns) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long row = 0; row < rows; ++row) out[row] = logsumexp_row(x + row * columns, columns);
}

// out = scale softmax(x) for each row, with x clamped to [-bound, bound]. `scale` has a number per row, and may be null
// for 1.
EXPORT void hodiff_softmax(const float* x, const float* scale, float* out, long rows, long columns, float bound) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long row = 0; row < rows; ++row)
    softmax_row(x + row * columns, scale ? scale[row] : 1.0f, out + row * columns, columns, bound);
}

// mean = <p, v> and out = scale p (v - mean) for each row, with p = softmax(x) and x clamped to [-bound, bound].
// `scale` may be null for 1; `mean` may be null if it is not needed.
EXPORT void hodiff_softmax_product(const float* x, const float* scale, const float* v, float* out, float* mean,
                                   long rows, long columns, float bound) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long row = 0; row < rows; ++row) {
    const long start = row * columns;
    product_row(x + start, scale ? scale[row] : 1.0f, v + start, out + start, mean ? mean + row : nullptr, columns,
                bound);
  }
}

// out = p (v - <p, v>) for each row.
EXPORT void hodiff_weighted(const float* p, const float* v, float* out, long rows, long columns) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long row = 0; row < rows; ++row)
    weighted_row(p + row * columns, v + row * columns, out + row * columns, columns);
}

// See weighted_pullback_row.
EXPORT void hodiff_weighted_pullback(const float* p, const float* v, const float* u, float* by_p, float* by_v,
                                     long rows, long columns) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long row = 0; row < rows; ++row) {
    const long start = row * columns;
    weighted_pullback_row(p + start, v + start, u + start, by_p + start, by_v + start, columns);
  }
}

// See curvature_row.
EXPORT void hodiff_softmax_curvature(const float* p, const float* s, const float* c, const float* e, float* by_s,
                                     float* by_c, float* by_e, long rows, long columns) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long row = 0; row < rows; ++row) {
    const long i = row * columns;
    curvature_row(p + i, s + i, c + i, e + i, by_s + i, by_c + i, by_e + i, columns);
  }
}

// See normalization_row. The rows are divided into parts, which run in parallel; each part adds to its own row of
// by_w (parts, columns), which the caller initializes to zero.
EXPORT void hodiff_normalization_curvature(const float* x, const float* g, const float* u, const float* w,
                                           const float* a, const float* c, float* by_g, float* by_x, double* by_w,
                                           long parts, long rows, long columns, double eps, long centred) {
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long part = 0; part < parts; ++part)
    for (long row = part * rows / parts; row < (part + 1) * rows / parts; ++row) {
      const long i = row * columns;
      normalization_row(x + i, g + i, u + i, w, a, c, by_g + i, by_x + i, by_w + part * columns, columns, eps,
                        centred != 0);
    }
}

// out = max(x + y, 0), and a mask that is set where the sum is positive or NaN; y may be null for 0.
EXPORT void hodiff_add_relu(const float* x, const float* y, float* out, std::uint8_t* mask, long n) {
  in_blocks(n, [=](long start, long count) {
    if (y)
      add_relu_block(x + start, y + start, out + start, mask + start, count);
    else
      relu_block(x + start, out + start, mask + start, count);
  });
}

// out = v where the mask is set, and 0 elsewhere.
EXPORT void hodiff_masked(const float* v, const std::uint8_t* mask, float* out, long n) {
  in_blocks(n, [=](long start, long count) { masked_block(v + start, mask + start, out + start, count); });
}

// See collapsed_part.
EXPORT void hodiff_collapsed_float(const float* a, const float* b, const float* u, const float* w, float* first,
                                   float* last, long rows, long n) {
  collapsed(a, b, u, w, first, last, rows, n);
}
EXPORT void hodiff_collapsed_double(const double* a, const double* b, const double* u, const double* w, double* first,
                                    double* last, long rows, long n) {
  collapsed(a, b, u, w, first, last, rows, n);
}

// out = x^T for a matrix x (rows, columns) with few columns.
EXPORT void hodiff_turn(const float* x, float* out, long rows, long columns) {
  // A block of rows fits in the L1 cache while its columns are read one after another.
  const long block = BLOCK * 4 / columns + 1;
#pragma omp parallel for schedule(static) if (rows * columns > SERIAL)
  for (long start = 0; start < rows; start += block)
    turn_block(x + start * columns, out + start, rows - start < block ? rows - start : block, columns, rows);
}

// Replace a square matrix with the leading dimension `stride` by the mean of itself and its transpose. `report` gets
// the largest difference of the two, the largest magnitude, and 0 if all elements are finite, else NaN.
EXPORT void hodiff_average_float(float* a, long n, long stride, float* report) {
  average_with_transpose(a, n, stride, report);
}
EXPORT void hodiff_average_double(double* a, long n, long stride, double* report) {
  average_with_transpose(a, n, stride, report);
}
