// Operators of a kind of branches, made with the first of them.
#include "comm/exec.h"
#include "engine/model/branch.h"
#include "gemm/gemm.h"

namespace tandem {
namespace {

/// On a GPU rank, runs the branch's GEMMs that are in no operator once, on zeros. Their algorithms
/// are then chosen before kernels wait for peers, and saved with those of the operators made next.
ModelContext& with_gemms(ModelContext& c, const BranchLayout& l) {
  if (!c.exec.on_gpu()) return c;
  const Activation hidden = c.make(c.options.dtype, c.tokens, c.config.hidden),
                   inner = c.make(c.options.dtype, c.tokens, l.out.columns),
                   dhidden = c.make(c.options.dtype, c.tokens, l.in.rows);
  for (const bool adds : {false, true}) {
    // Gradients in bf16 are of one microbatch a step, and stored.
    if (adds && c.options.gradient_dtype == DType::bf16) continue;
    if (c.quantizes_weight_gradients()) {
      c.quantized->write_weight_gradient(hidden, inner, c.gradient(l.out), adds);
      c.quantized->write_weight_gradient(dhidden, hidden, c.gradient(l.in), adds);
      continue;
    }
    gemm(c.exec, hidden->transposed(), inner, c.gradient(l.out), {.accumulate = adds});
    if (c.tp.size() > 1) continue;
    gemm(c.exec, dhidden->transposed(), hidden, c.gradient(l.in), {.accumulate = adds});
  }
  wait(c.exec);
  return c;
}
}  // namespace

GemmRs::Shape dgrad_shape(const ModelContext& c, const WeightMatrix& m, int64_t rows) {
  return {
      .m = rows, .n = c.config.hidden, .k = m.rows, .dtype = c.options.dtype, .weight_kn = true};
}

GemmRs make_dgrad(ModelContext& c, const WeightMatrix& m, int64_t rows) {
  return GemmRs(c.tp, dgrad_shape(c, m, rows), options_on(c.tp, c.options.overlap));
}

std::optional<AgWgrad> make_wgrad(ModelContext& c, const WeightMatrix& m, int64_t rows) {
  if (c.tp.size() == 1) return {};
  return AgWgrad(c.tp, {rows, m.rows, c.config.hidden, c.options.dtype}, c.options.overlap);
}

BranchProducts::BranchProducts(ModelContext& c, const BranchLayout& l)
    : attention(l.attention ? std::make_unique<BranchAttention>(c, l) : nullptr),
      in(with_gemms(c, l), {c.tokens, l.in.rows, c.config.hidden, c.options.dtype},
         c.options.overlap),
      out(c, {c.tokens, c.config.hidden, l.out.columns, c.options.dtype},
          with_wire(c.options.overlap, branch_wire(c.options.codec, l))),
      out_dgrad(c,
                {.m = c.tokens,
                 .n = l.out.columns,
                 .k = c.config.hidden,
                 .dtype = c.options.dtype,
                 .keep_gathered = true,
                 .weight_kn = true},
                c.options.overlap),
      in_dgrad(c, dgrad_shape(c, l.in, c.tokens), c.options.overlap),
      in_wgrad(make_wgrad(c, l.in, c.tokens)),
      residual(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      d_act(c.make(c.options.dtype, c.tokens, l.out.columns)),
      dhidden(c.make(c.options.dtype, c.tokens, l.in.rows)),
      d_x_norm(c.make(c.options.dtype, c.local_rows.count, c.config.hidden)),
      d_whole_before(c.make(DType::f32, c.tp.size() > 1 ? l.whole_rows : 0, c.config.hidden)) {}
}  // namespace tandem
