// Decoder layers for inference: a block of `rows` tokens through all branches, on operators built
// for that number of rows. Blocks of all sizes share the cache of keys and values.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "engine/infer/cache/kv_cache.h"
#include "engine/infer/int8_weights.h"
#include "engine/model/layer.h"
#include "tandem/communicator.h"
#include "tandem/moe.h"
#include "tandem/overlap.h"

namespace tandem {

/// Forms of a decoder's steps on a kind of device.
struct DecoderForms {
  bool reads_windows;    ///< attention reads no page before a layer's window
  bool runs_one_row;     ///< experts of one row do not need the MoE operator
  bool has_row_sums;     ///< RowSums; else steps of about max rows are split over the ranks
  bool fuses_additions;  ///< to the residual stream, into GEMMs and norms
};
const DecoderForms& device_forms(const Exec& exec);

/// State shared by all kinds of blocks; everything is on exec's device.
struct DecoderContext {
  Communicator& tp;
  const ModelConfig& config;
  const ModelLayout& layout;
  const Weights& weights;
  DType dtype;
  KvCache& cache;
  CodecPolicy codec = {};
  Exec exec = {};
  const Int8Weights* int8 = nullptr;  ///< matrices, unless they are in `weights`

  const DecoderForms& forms() const { return device_forms(exec); }
  LayerView view() const { return {config, layout, weights, exec}; }
  Activation activation(int64_t rows, int64_t columns) const {
    return Activation(dtype, rows, columns, exec.device);
  }
  Activation f32(int64_t rows, int64_t columns) const {
    return Activation(DType::f32, rows, columns, exec.device);
  }
};

/// Tokens of a block on exec's device.
class TokenRows {
 public:
  TokenRows(const Exec& exec, int64_t rows);
  /// i32 [tokens.size()], valid until the next call.
  Tensor upload(std::span<const int32_t> tokens);

 private:
  Exec exec_;
  Activation tokens_;
  Upload upload_;
};

/// Experts for a block of rows or for one row; every rank holds a shard of each expert.
class DecoderExperts {
 public:
  /// At most `rows` rows over all ranks. `split`: in the MoE operator, to which each rank passes
  /// its share of them; CPU ranks compute one row without it. Collective.
  DecoderExperts(const DecoderContext& context, int64_t rows, bool split,
                 const OverlapOptions& overlap);
  /// x (f32) += output of the experts for `x_norm`, rows of this rank; w_in and w_out hold all
  /// experts' weights.
  void run(const BranchLayout& branch, const Tensor& x_norm, const Tensor& w_in,
           const Tensor& w_out, const Tensor& x);
  /// Runs the experts on rows that every rank has.
  void run_shared(const BranchLayout& branch, const Tensor& x_norm, const Tensor& w_in,
                  const Tensor& w_out, const Tensor& x);

 private:
  void run_row(const Tensor& x_norm, const Tensor& w_in, const Tensor& w_out, const Tensor& out);

  DecoderContext context_;
  std::optional<MoeLayer> layer_;
  MoeBatch batch_;
  Activation input_, logits_, scores_, chosen_, weights_, out_, gate_up_, inner_, product_;
};

/// Experts for rows that every rank has, of weights in int8, on CPU ranks. A row's bits do not
/// depend on other rows.
class RowExperts {
 public:
  RowExperts(const DecoderContext& context, int64_t rows);
  /// Writes this rank's sums for `x_norm`, [rows, hidden], to `partial`; their sum over the ranks
  /// is the experts' output.
  void run(const BranchLayout& branch, const Tensor& x_norm, const Tensor& partial);

 private:
  void add_expert(const BranchLayout& branch, int64_t expert, const Tensor& x_norm);

  DecoderContext context_;
  std::vector<std::pair<int64_t, float>> routed_;  ///< rows of an expert and their weights
  Activation input_, logits_, scores_, chosen_, weights_, x_, gate_up_, inner_, product_, out_;
};

/// Operators of branches whose rows the ranks divide, by kind.
struct RowProducts {
  AgGemm in;
  GemmRs out;
};
using BranchProducts = std::array<std::unique_ptr<RowProducts>, kBranchKinds>;
/// Collective: times the operators, unless `overlap` says which to use.
BranchProducts make_products(const DecoderContext& context, int64_t rows,
                             const OverlapOptions& overlap);

/// Prefill with a row-sharded residual stream.
class PrefillBlock {
 public:
  /// Collective.
  PrefillBlock(const DecoderContext& context, int64_t rows, const OverlapOptions& overlap);
  /// Runs the layers on a prompt (Prefill::run in prefill.h).
  void run(std::span<const int32_t> tokens, int64_t position, const Tensor& last);

 private:
  struct Steps;
  DecoderContext context_;
  int64_t rows_;
  Shard local_rows_;
  BranchProducts products_;
  std::unique_ptr<DecoderExperts> experts_;
  std::vector<int32_t> padded_;
  TokenRows tokens_;
  Activation looked_up_, shard_, x_, inverse_rms_, x_norm_, hidden_, inner_, residual_;
};

/// Logits of one row.
class TokenHead {
 public:
  explicit TokenHead(const DecoderContext& context);
  /// residual: f32 [1, hidden], the same on every rank. Returns the logits over the whole
  /// vocabulary, valid until the next call. Collective.
  Tensor run(const Tensor& residual);

 private:
  DecoderContext context_;
  Activation inverse_rms_, x_norm_, local_logits_, logits_;
  std::vector<float> host_logits_;
};

/// Decode of one token: every rank holds the whole residual row.
class DecodeStep {
 public:
  /// Collective.
  DecodeStep(const DecoderContext& context, const OverlapOptions& overlap);
  /// Writes the token's residual to x, f32 [1, hidden].
  void run(int32_t token, int64_t position, const Tensor& x);

 private:
  struct Steps;

  DecoderContext context_;
  /// nullptr if sums are encoded or weights are int8.
  std::array<std::unique_ptr<GemmAr>, kBranchKinds> out_;
  std::unique_ptr<DecoderExperts> experts_;
  std::unique_ptr<RowExperts> row_experts_;  ///< of int8 weights
  TokenRows tokens_;
  Activation looked_up_, inverse_rms_, x_norm_, hidden_, inner_, residual_, experts_out_;
};

}  // namespace tandem
