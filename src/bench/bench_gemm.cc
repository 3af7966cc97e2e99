#include "bench/bench_gemm.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <optional>

#include "comm/exec.h"
#include "core/random_buffer.h"
#include "core/replay.h"
#include "kernels/elementwise.h"
#include "tandem/error.h"
#include "tune/measure.h"

namespace tandem {
namespace {

constexpr int64_t kUncachedBytes = int64_t{512} << 20;  // several times the caches
constexpr int64_t kMinCopies = 4, kMaxCopies = 512;     // of 512 x 512 codes: 138 MB
constexpr int64_t kMaxCpuCopies = 64;                   // whose products take longer
constexpr int64_t kSampledColumns = 32;

/// Bound of a product's error relative to the root of the sum of its squared terms, for sums in
/// f32: a weight rounded to bf16 exceeds it.
constexpr double kErrorOfRoot = 1e-4;

/// Copies of a weight, and its products.
class Products {
 public:
  Products(const Exec& exec, const GemmBench& q, const std::string& name, const Tensor& values)
      : exec_(exec), format_(parse_weight_format(name)), n_(q.n), k_(q.k) {
    const double bytes = format_ ? bytes_per_weight(*format_) : double(size_of(q.dtype));
    const auto one = int64_t(double(n_ * k_) * bytes) + 1;
    const int64_t copies = std::clamp(kUncachedBytes / one + 1, kMinCopies,
                                      exec.on_gpu() ? kMaxCopies : kMaxCpuCopies);
    for (int64_t i = 0; i < copies; ++i) {
      if (format_) {
        coded_.push_back(std::make_unique<CodedWeight>(exec, *format_, n_, k_));
        coded_.back()->quantize(exec, values);
      } else {
        uncoded_.emplace_back(size_t(n_ * k_) * size_of(q.dtype), exec.device);
        weights_.push_back(uncoded_.back().view(q.dtype, {n_, k_}));
        cast(exec, values, weights_.back());
      }
    }
    wait(exec);
  }
  int64_t copies() const { return int64_t(std::max(coded_.size(), weights_.size())); }
  int64_t bytes() const {
    return int64_t(format_ ? coded_.front()->bytes() : uncoded_.front().bytes());
  }
  void multiply(int64_t copy, const Tensor& x, const Tensor& out) const {
    if (format_) return coded_[size_t(copy)]->multiply(exec_, x, out);
    gemm(exec_, x, weights_[size_t(copy)].transposed(), out, {.reads_b_early = true});
  }
  /// The weight as it is multiplied, f32 [n, k].
  void read(const Tensor& to) const {
    format_ ? coded_.front()->read(exec_, to) : cast(exec_, weights_.front(), to);
  }

 private:
  Exec exec_;
  std::optional<WeightFormat> format_;
  int64_t n_, k_;
  std::vector<std::unique_ptr<CodedWeight>> coded_;
  std::vector<Memory> uncoded_;
  std::vector<Tensor> weights_;
};

/// Matrix that `write` writes, f32 [rows, columns] on exec's device, on the host.
struct HostMatrix {
  HostMatrix(const Exec& exec, int64_t rows, int64_t columns,
             const std::function<void(const Tensor&)>& write)
      : memory(size_t(rows * columns) * sizeof(float)),
        values(memory.view(DType::f32, {rows, columns})) {
    const Memory written(memory.bytes(), exec.device);
    write(written.view(DType::f32, {rows, columns}));
    copy(exec, written.view(DType::f32, {rows, columns}), values);
  }
  Memory memory;
  Tensor values;
};

/// Max error in sampled columns, as a share of its bound.
double error_of(const Tensor& weight, const Tensor& x, const Tensor& out) {
  const int64_t n = weight.dim(0), k = weight.dim(1),
                step = std::max<int64_t>(1, n / kSampledColumns) | 1;  // all places in a tile
  double worst = 0;
  for (int64_t column = 0; column < n; column += step) {
    const auto* const w = weight.as<const float>() + column * k;
    for (int64_t row = 0; row < x.dim(0); ++row) {
      double sum = 0, squares = 0;
      for (int64_t i = 0; i < k; ++i) {
        const double term = double(w[i]) * double(x.as<const float>()[row * k + i]);
        sum += term, squares += term * term;
      }
      const double error = std::abs(double(out.as<const float>()[row * n + column]) - sum);
      const double share = error / (kErrorOfRoot * std::sqrt(squares));
      worst = std::isnan(share) ? HUGE_VAL : std::max(worst, share);
    }
  }
  return worst;
}

BenchTimes times_of_one(const std::vector<double>& seconds, int64_t count) {
  std::vector<double> each = seconds;
  for (double& value : each) value /= double(count);
  return times_of(each);
}

/// Operands of all products, and the passes that are timed.
struct Passes {
  Passes(Communicator& comm, const GemmBench& q)
      : exec(make_exec(comm)),
        x(random_on(exec, q.dtype, {kMaxFewRows, q.k}, 1)),
        out(size_t(kMaxFewRows * q.n) * sizeof(float), exec.device) {
    const Memory values = random_on(exec, DType::f32, {q.n, q.k}, 2);
    for (const std::string& name : q.weights) {
      products.push_back(
          std::make_unique<Products>(exec, q, name, values.view(DType::f32, {q.n, q.k})));
    }
  }
  static Memory random_on(const Exec& exec, DType dtype, Tensor::Extents shape, uint64_t seed) {
    const int64_t elements = shape.begin()[0] * shape.begin()[1];
    const Memory host = random_buffer(dtype, elements, seed);
    Memory result(host.bytes(), exec.device);
    copy(exec, host.view(dtype, {elements}), result.view(dtype, {elements}));
    return result;
  }

  Exec exec;
  Memory x, out;
  std::vector<std::unique_ptr<Products>> products;
  Replay replay;
};

void check_request(const Communicator& comm, const GemmBench& q) {
  if (comm.size() != 1) {
    throw InvalidArgument(fmt::format("bench gemm: {} ranks: expected 1", comm.size()));
  }
  for (const int64_t rows : q.rows) {
    if (rows >= 1 && rows <= kMaxFewRows) continue;
    throw InvalidArgument(
        fmt::format("bench gemm: --rows {}: expected 1 to {}", rows, kMaxFewRows));
  }
}

}  // namespace

bool GemmBenchResult::ok() const {
  return std::ranges::all_of(rows, [](const GemmBenchRow& row) { return row.error <= 1; });
}

GemmBenchResult run_gemm_bench(Communicator& comm, const GemmBench& q) {
  check_request(comm, q);
  Passes passes(comm, q);
  const Exec& exec = passes.exec;
  const auto out_of = [&](int64_t rows) { return passes.out.view(DType::f32, {rows, q.n}); };
  const auto x_of = [&](int64_t rows) { return passes.x.view(q.dtype, {rows, q.k}); };
  GemmBenchResult result;
  std::vector<std::function<void()>> variants;
  for (size_t i = 0; i < q.weights.size(); ++i) {
    const Products& products = *passes.products[i];
    const HostMatrix weight(exec, q.n, q.k, [&](const Tensor& to) { products.read(to); });
    for (const int64_t rows : q.rows) {
      products.multiply(0, x_of(rows), out_of(rows));
      const HostMatrix x(exec, rows, q.k, [&](const Tensor& to) { cast(exec, x_of(rows), to); });
      const HostMatrix out(exec, rows, q.n,
                           [&](const Tensor& to) { cast(exec, out_of(rows), to); });
      result.rows.push_back({q.weights[i],
                             rows,
                             {},
                             products.bytes(),
                             error_of(weight.values, x.values, out.values)});
      variants.push_back([&, i, rows] {
        passes.replay.run(exec, {int64_t(i), rows, 0, 0}, [&] {
          for (int64_t c = 0; c < passes.products[i]->copies(); ++c) {
            passes.products[i]->multiply(c, x_of(rows), out_of(rows));
          }
        });
        wait(exec);
      });
    }
  }
  const int64_t bytes = std::ranges::max(result.rows, {}, &GemmBenchRow::bytes).bytes;
  const Memory from(size_t(bytes), exec.device), to(size_t(bytes), exec.device);
  variants.push_back([&] {
    for (int i = 0; i < kMinCopies; ++i) {
      copy(exec, from.view(DType::u8, {bytes}), to.view(DType::u8, {bytes}));
    }
    wait(exec);
  });
  const auto seconds =
      measure(comm, variants, {.min_rounds = 5, .max_rounds = 200, .seconds = q.seconds});
  for (size_t i = 0; i < result.rows.size(); ++i) {
    const int64_t copies = passes.products[i / q.rows.size()]->copies();
    result.rows[i].times = times_of_one(seconds[i], copies);
  }
  result.copy_bytes = 2 * bytes;
  result.copy = times_of_one(seconds.back(), kMinCopies);
  return result;
}

}  // namespace tandem
