#include <fmt/format.h>

#include "overlap/check.h"
#include "overlap/gemm_rs/cpu.h"
#include "overlap/tuner.h"

namespace tandem {

class GemmRs::Impl {
 public:
  Impl(Communicator& comm, const Shape& shape, const OverlapOptions& options)
      : shape_(shape),
        out_rows_(shard_of(shape.m, comm.size(), comm.rank()).count),
        plan_(agree(comm, shape, options)),
        cpu_(comm, shape) {
    if (options.strategy == Strategy::automatic && comm.size() > 1) tune_plan(comm, options);
  }

  void run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias) {
    check_rows("gemm_rs", "x", x, shape_.m, shape_.k, shape_.dtype, shape_.dtype);
    check_matrix("gemm_rs", "weight", weight, shape_.n, shape_.k, shape_.dtype);
    check_rows("gemm_rs", "out", out, out_rows_, shape_.n, shape_.dtype, DType::f32);
    check_bias("gemm_rs", bias, shape_.n, out.dtype());
    cpu_.run(plan_, x, weight, out, bias);
  }
  Strategy strategy() const { return plan_.strategy(); }

 private:
  /// The plan unless it is measured; throws before anything is allocated.
  static Plan agree(Communicator& comm, const Shape& s, const OverlapOptions& options) {
    check_shape("gemm_rs", s.m, s.n, s.k, s.dtype);
    const Plan plan = fixed_plan("gemm_rs", options, s.m / comm.size());
    comm.require_same("gemm_rs",
                      fmt::format("m {} n {} {} {} chunks {}", s.m, s.n, name_of(s.dtype),
                                  name_of(options.strategy), options.chunks));
    return plan;
  }

  void tune_plan(Communicator& comm, const OverlapOptions& options) {
    const Buffer x(size_t(shape_.m * shape_.k) * size_of(shape_.dtype));
    const Buffer w(size_t(shape_.n * shape_.k) * size_of(shape_.dtype));
    const Buffer out(size_t(out_rows_ * shape_.n) * size_of(shape_.dtype));
    const Tensor x_rows = x.view(shape_.dtype, {shape_.m, shape_.k});
    const Tensor weight = w.view(shape_.dtype, {shape_.n, shape_.k});
    const Tensor result = out.view(shape_.dtype, {out_rows_, shape_.n});
    const auto plans = candidates(options, shape_.m / comm.size());
    plan_ =
        tune(comm, "gemm_rs",
             fmt::format("m {} n {} k {} {}", shape_.m, shape_.n, shape_.k, name_of(shape_.dtype)),
             plans, [&](const Plan& plan) { cpu_.run(plan, x_rows, weight, result, nullptr); });
  }

  Shape shape_;
  int64_t out_rows_;
  Plan plan_;
  GemmRsCpu cpu_;
};

GemmRs::GemmRs(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(std::make_unique<Impl>(comm, shape, options)) {}
GemmRs::~GemmRs() = default;

void GemmRs::run(const Tensor& x, const Tensor& weight, const Tensor& out, const Tensor* bias) {
  impl_->run(x, weight, out, bias);
}
Strategy GemmRs::strategy() const {
  return impl_->strategy();
}

}  // namespace tandem
