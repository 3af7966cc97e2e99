#include "integer_weights.h"

#include <string_view>

#include "tandem/random.h"

namespace tandem {
namespace {

// Columns of the residual stream: gates read the first, routers the next, all others hold values.
// Branches add to values only.
constexpr int64_t kGateColumns = 2, kRouterColumns = 2, kFlags = kGateColumns + kRouterColumns;
// Powers of two: the residual stream, its norms and the routing gap; others make up for these.
constexpr double kResidual = 0x1p-65, kNorm = 0x1p32, kFinalNorm = 0x1p31;
constexpr double kNormalized = kResidual * kNorm;
constexpr double kGap = 128;
constexpr double kAuxLoss = 0x1p-92;  // its gradient is as large as the loss's

bool contains(std::string_view text, std::string_view word) {
  return text.find(word) != std::string_view::npos;
}

uint32_t draw(const std::string& tensor, int64_t index) {
  return philox(11, stream_of(tensor.c_str()), uint64_t(index))[0];
}
double draw_sign(const std::string& tensor, int64_t index) {
  return draw(tensor, index) % 2 == 0 ? 1 : -1;
}

/// Row of the embedding or the head. Those of the second half are the negated first half, so that
/// an even softmax has no gradient besides the targets'.
double word_weight(const std::string& tensor, int64_t row, int64_t column, int64_t columns) {
  const double sign = row < 256 ? 1 : -1;
  const uint32_t value = draw(tensor, (row % 256) * columns + column);
  const bool is_router = column >= kGateColumns && column < kFlags;
  return sign * kResidual * (is_router ? double(value % 2) : double(value % 3) - 1);
}

/// One value of `size` for each index.
int64_t choose(const std::string& tensor, int64_t index, int64_t size) {
  return int64_t(draw(tensor, index) % uint32_t(size));
}

double matrix_weight(const ModelConfig& c, const std::string& tensor, int64_t row, int64_t column) {
  const int64_t values = c.hidden - kFlags;
  const auto reads = [&](int64_t read) {
    return column == read ? draw_sign(tensor + " sign", row) : 0.0;
  };
  const auto writes = [&](double scale) {  // each input to one column of the residual stream
    return row == kFlags + choose(tensor, column, values)
               ? scale * draw_sign(tensor + " sign", column)
               : 0.0;
  };
  if (contains(tensor, "q_proj") || contains(tensor, "k_proj")) return 0;  // even attention
  if (contains(tensor, "v_proj") || contains(tensor, "up_proj") || contains(tensor, ".w3.")) {
    return reads(kFlags + choose(tensor, row, values));
  }
  if (contains(tensor, "gate_proj") || contains(tensor, ".w1.")) {
    return reads(choose(tensor, row, kGateColumns));
  }
  if (contains(tensor, "block_sparse_moe.gate")) {  // equal logits of experts e and e + 2
    return column == kGateColumns + row % kRouterColumns ? kGap / kNormalized : 0;
  }
  if (contains(tensor, "o_proj")) return writes(2 * kResidual / kNormalized);
  return writes(2 * kResidual / (kNormalized * kNormalized));  // down_proj, w2: after SiLU's half
}

}  // namespace

TrainConfig integer_config(TrainConfig config) {
  ModelConfig& model = config.model;
  model.vocab = 512;
  model.norm_eps = 1;
  model.sliding_window = 2;
  model.full_attention_freq = 0;
  model.route_scale = 2;  // both experts of a token have weight 1
  model.aux_loss_coeff = kAuxLoss;
  return config;
}

double integer_weight(const ModelConfig& c, const std::string& tensor, int64_t element) {
  if (contains(tensor, "embed_tokens") || contains(tensor, "lm_head")) {
    return word_weight(tensor, element / c.hidden, element % c.hidden, c.hidden);
  }
  if (contains(tensor, "norm.weight")) {
    const bool is_router = element >= kGateColumns && element < kFlags;
    // Gradients through the routers are large: the head's would be too small next to them.
    if (!contains(tensor, "layers")) return is_router ? 0 : kFinalNorm * draw_sign(tensor, element);
    return is_router ? kNorm
                     : kNorm * draw_sign(tensor, element);  // so that all experts are chosen
  }
  const int64_t columns = contains(tensor, "down_proj") ? c.ffn
                          : contains(tensor, ".w2.")    ? c.expert_ffn
                                                        : c.hidden;
  return matrix_weight(c, tensor, element / columns, element % columns);
}

void initialize_integers(const ModelConfig& config, const Stage& stage) {
  auto* const values = stage.parameters().as<float>();
  for (const Parameter& p : stage.parameter_list()) {
    const LocalShard shard = local_shard(p);
    for (int64_t row = 0; row < shard.rows; ++row) {
      for (int64_t column = 0; column < shard.columns; ++column) {
        values[p.offset + row * shard.row_stride + column] =
            float(integer_weight(config, p.name, shard.first + row * shard.whole_columns + column));
      }
    }
  }
}

}  // namespace tandem
