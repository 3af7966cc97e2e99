#include <fmt/format.h>

#include "overlap/ag_wgrad/cpu.h"
#include "overlap/check.h"
#include "overlap/tuner.h"

namespace tandem {

class AgWgrad::Impl {
 public:
  Impl(Communicator& comm, const Shape& shape, const OverlapOptions& options)
      : shape_(shape),
        rows_(shard_of(shape.m, comm.size(), comm.rank()).count),
        plan_(agree(comm, shape, options)),
        cpu_(comm, shape) {
    if (options.strategy == Strategy::automatic && comm.size() > 1) tune_plan(comm);
  }

  void run(const Tensor& x, const Tensor& dy, const Tensor& dw) {
    check_rows("ag_wgrad", "x", x, rows_, shape_.k, shape_.dtype, shape_.dtype);
    check_rows("ag_wgrad", "dy", dy, shape_.m, shape_.n, shape_.dtype, shape_.dtype);
    check_matrix("ag_wgrad", "dw", dw, shape_.n, shape_.k, DType::f32);
    cpu_.run(plan_, x, dy, dw);
  }
  Strategy strategy() const { return plan_.strategy(); }

 private:
  /// The plan unless it is measured; throws before anything is allocated. A shard's product is
  /// never split, so one transfer per shard is enough unless asked for otherwise.
  static Plan agree(Communicator& comm, const Shape& s, const OverlapOptions& options) {
    check_shape("ag_wgrad", s.m, s.n, s.k, s.dtype);
    const Plan plan = fixed_plan("ag_wgrad", options, 1);
    comm.require_same("ag_wgrad",
                      fmt::format("m {} k {} {} {} chunks {}", s.m, s.k, name_of(s.dtype),
                                  name_of(options.strategy), options.chunks));
    return plan;
  }

  void tune_plan(Communicator& comm) {
    const Buffer x(size_t(rows_ * shape_.k) * size_of(shape_.dtype));
    const Buffer dy(size_t(shape_.m * shape_.n) * size_of(shape_.dtype));
    const Buffer dw(size_t(shape_.n * shape_.k) * size_of(DType::f32));
    const Tensor x_rows = x.view(shape_.dtype, {rows_, shape_.k});
    const Tensor gradient = dy.view(shape_.dtype, {shape_.m, shape_.n});
    const Tensor result = dw.view(DType::f32, {shape_.n, shape_.k});
    const Plan plans[] = {{false, 1}, {true, plan_.chunks}};
    plan_ =
        tune(comm, "ag_wgrad",
             fmt::format("m {} n {} k {} {}", shape_.m, shape_.n, shape_.k, name_of(shape_.dtype)),
             plans, [&](const Plan& plan) { cpu_.run(plan, x_rows, gradient, result); });
  }

  Shape shape_;
  int64_t rows_;
  Plan plan_;
  AgWgradCpu cpu_;
};

AgWgrad::AgWgrad(Communicator& comm, const Shape& shape, const OverlapOptions& options)
    : impl_(std::make_unique<Impl>(comm, shape, options)) {}
AgWgrad::~AgWgrad() = default;

void AgWgrad::run(const Tensor& x, const Tensor& dy, const Tensor& dw) {
  impl_->run(x, dy, dw);
}
Strategy AgWgrad::strategy() const {
  return impl_->strategy();
}

}  // namespace tandem
