// Backward pass of MoeOnGpus.
#include "core/cuda/check.h"
#include "core/operands.h"
#include "overlap/contract/cuda/dense.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/cuda/memory.h"
#include "tandem/error.h"

namespace tandem::gpu {

MoeSavedActivations::MoeSavedActivations(const ExpertsShape& shape, const MoeSpace& space,
                                         uint64_t op_)
    : saved(shape),
      experts(ints(space.routings())),
      weights(floats(space.routings())),
      call(sizeof(uint64_t)),
      op(op_) {}

std::unique_ptr<MoeSavedActivations> MoeOnGpus::make_saved() const {
  return trains() ? std::make_unique<MoeSavedActivations>(experts_, space_, number_) : nullptr;
}

void MoeOnGpus::backward(const MoeOfLayer& layer, const Tensor& dout, const Tensor& w_in,
                         const Tensor& w_out, const MoeRows& rows, const Tensor& dx,
                         const Tensor& dweights, const Tensor& dw_in, const Tensor& dw_out,
                         WeightGradients gradients) {
  const MoeShape& s = coords_.shape;
  check_weight_gradients(dw_in, dw_out, gradients);
  if (s.tokens == 0) {
    if (gradients == WeightGradients::store) clear(dw_in, dw_out);
    return;
  }
  if (!trains()) {
    throw InvalidArgument("moe: a backward pass on GPUs: expected MoeOptions::backward");
  }
  const auto* activations = static_cast<const MoeSavedActivations*>(rows.on_gpu.get());
  if (!activations || activations->op != number_ || activations->layer != layer.number ||
      activations->rows < 0) {
    throw InvalidArgument("moe: batch: expected one that a forward pass of this layer has filled");
  }
  const auto check = [&](const char* name, const Tensor& tensor, DType dtype, int64_t count,
                         int64_t columns) {
    check_matrix(comm_, "moe", name, tensor, dtype, count, columns);
  };
  check("dout", dout, s.dtype, activations->rows, s.hidden);
  check("dx", dx, dx.dtype() == DType::f32 ? DType::f32 : s.dtype, activations->rows, s.hidden);
  check("dweights", dweights, DType::f32, activations->rows, s.top_k);
  check("w_in", w_in, s.dtype, in_rows(), s.hidden);
  check("w_out", w_out, s.dtype, out_rows(), coords_.ffn);
  require_apart("moe",
                {{"dx", &dx}, {"dweights", &dweights}, {"dw_in", &dw_in}, {"dw_out", &dw_out}},
                {{"dout", &dout}, {"w_in", &w_in}, {"w_out", &w_out}});
  comm_.check_device();
  run_backward(chosen_backward_, dout, w_in, w_out, *activations, dx, dweights, dw_in, dw_out,
               gradients, &layer);
}

void MoeOnGpus::check_weight_gradients(const Tensor& dw_in, const Tensor& dw_out,
                                       WeightGradients gradients) const {
  const MoeShape& s = coords_.shape;
  const bool is_rounded =
      gradients == WeightGradients::store && dw_in.dtype() == s.dtype && dw_out.dtype() == s.dtype;
  const DType written = is_rounded ? s.dtype : DType::f32;
  check_matrix(comm_, "moe", "dw_in", dw_in, written, in_rows(), s.hidden);
  check_matrix(comm_, "moe", "dw_out", dw_out, written, out_rows(), coords_.ffn);
}

// No rank brings rows.
void MoeOnGpus::clear(const Tensor& dw_in, const Tensor& dw_out) const {
  for (const Tensor* gradient : {&dw_in, &dw_out}) {
    check(cudaMemsetAsync(gradient->data(), 0, gradient->bytes(), comm_.stream()),
          "moe: gradients without rows");
  }
}

void MoeOnGpus::run_backward(size_t candidate, const Tensor& dout, const Tensor& w_in,
                             const Tensor& w_out, const MoeSavedActivations& activations,
                             const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                             const Tensor& dw_out, WeightGradients gradients,
                             const MoeOfLayer* layer) {
  const MoeOfLayer& of = layer ? *layer : alone_;
  const Enqueueing enqueueing(comm_);
  comm_.enqueue([&] {
    enqueue_backward(candidate, dout, w_in, w_out, activations, dx, dweights, dw_in, dw_out,
                     gradients, of);
  });
}

void MoeOnGpus::enqueue_backward(size_t candidate, const Tensor& dout, const Tensor& w_in,
                                 const Tensor& w_out, const MoeSavedActivations& activations,
                                 const Tensor& dx, const Tensor& dweights, const Tensor& dw_in,
                                 const Tensor& dw_out, WeightGradients gradients,
                                 const MoeOfLayer& layer) {
  const MoeShape& s = coords_.shape;
  const MoeRouting routing{activations.experts.view(DType::i32, {activations.rows, s.top_k}),
                           activations.weights.view(DType::f32, {activations.rows, s.top_k})};
  PassArgs args{.call = call_of(routing, layer),
                .rows = dout,
                .w_in = w_in,
                .w_out = w_out,
                .result = dx,
                .activations = &activations,
                .backward = &backward_[candidate],
                .dw_in = dw_in,
                .dw_out = dw_out,
                .gradients = gradients};
  args.call.saved_call = reinterpret_cast<uint64_t*>(activations.call.data());
  args.call.results = gradients_->dx().data();
  args.call.backward = true;
  if (args.backward->blocks.pushes) args.call.staged_sums = staged_sums_.data();
  args.call.d_gate_weight = floats(d_gate_weight_);
  args.call.dweights = dweights.as<float>();
  enqueue_pass(args.backward->pass, args);
}

}  // namespace tandem::gpu
