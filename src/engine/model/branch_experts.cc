#include "engine/model/branch.h"
#include "engine/model/router.h"
#include "gemm/gemm.h"
#include "kernels/elementwise.h"

namespace tandem {
namespace {

MoeShape moe_shape(const ModelContext& c) {
  return {.tokens = shard_of(c.tokens, c.tp.size(), 0).count,
          .hidden = c.config.hidden,
          .ffn = c.config.ffn_per_expert(),
          .experts = int(c.config.experts),
          .top_k = int(c.config.top_k),
          .tp = c.tp.size(),
          .dtype = c.options.dtype};
}

MoeOptions training_moe_options(const ModelContext& c,
                                const std::optional<MoeActivation>& activation) {
  MoeOptions options = moe_options(c.options.overlap, c.options.codec);
  if (activation) options.activation = &*activation;
  options.backward = true;
  options.save = c.options.moe_save;
  if (c.options.fp8_experts) {
    options.quantization = &c.expert_quantization;
    options.dispatch = {};  // rows are sent as e4m3
  }
  return options;
}

}  // namespace

BranchExperts::BranchExperts(ModelContext& c, const BranchLayout& l)
    : routed(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      d_x_norm(c.make(DType::f32, c.local_rows.count, c.config.hidden)),
      x_norm(c.make(DType::f32, c.options.dtype == DType::f32 ? 0 : c.local_rows.count,
                    c.config.hidden)),
      logits(c.make(DType::f32, c.local_rows.count, c.config.experts)),
      dlogits(c.make(DType::f32, c.local_rows.count, c.config.experts)),
      dweights(c.make(DType::f32, c.local_rows.count, c.config.top_k)),
      drouter(c.make(DType::f32, c.config.experts, c.config.hidden)),
      d_bias(c.make(DType::f32, l.experts_bias.rows, l.experts_bias.columns)),
      activation(expert_activation(c.config)),
      layer(with_router_gemms(c, l), moe_shape(c),
            options_on(c.experts, training_moe_options(c, activation))) {
  prepare(c.recomputed->branches);
}

void BranchExperts::prepare(std::span<const BranchActivations> branches) {
  for (const BranchActivations& each : branches) {
    if (each.expert_memory) layer.prepare(*each.expert_memory);
  }
}

Communicator& BranchExperts::with_router_gemms(ModelContext& c, const BranchLayout& l) {
  const Tensor router = c.weights.router(l.router);
  const Tensor& rows = d_x_norm;
  gemm(c.exec, rows, router.transposed(), logits);
  gemm(c.exec, dlogits, router, d_x_norm, {.accumulate = true});
  for (const bool adds : {false, true}) {
    gemm(c.exec, dlogits->transposed(), rows, drouter, {.accumulate = adds});
  }
  wait(c.exec);
  return c.experts;
}

}  // namespace tandem
