// J_n(x), Bessel's function of the first kind, of a float64 tensor on a CPU. These headers are torch's stable ones, which
// compile in seconds, and are made for libraries that go on working with later versions of torch.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>

using torch::stable::Tensor;

Tensor bessel(Tensor x, int64_t n) {
  const Tensor input = torch::stable::contiguous(x);
  Tensor output = torch::stable::empty_like(input);
  const double* from = input.const_data_ptr<double>();
  double* to = output.mutable_data_ptr<double>();
  for (int64_t i = 0; i < input.numel(); ++i) {
    // An odd order changes its sign with x and with n.
    const bool negative = n % 2 != 0 && (from[i] < 0) != (n < 0);
    const double value = std::cyl_bessel_j(std::abs(static_cast<double>(n)), std::abs(from[i]));
    to[i] = negative ? -value : value;
  }
  return output;
}

STABLE_TORCH_LIBRARY(lessons, library) { library.def("bessel(Tensor x, int n) -> Tensor"); }

STABLE_TORCH_LIBRARY_IMPL(lessons, CPU, library) { library.impl("bessel", TORCH_BOX(&bessel)); }
