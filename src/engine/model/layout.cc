#include "engine/model/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "core/host_copy.h"
#include "tandem/collectives.h"
#include "tandem/error.h"
#include "tandem/random.h"

namespace tandem {
namespace {

constexpr int64_t kAlignment = 32;                // elements: whole cache lines in f32 and in bf16
constexpr int64_t kLongInitialization = 1 << 20;  // elements: worth a rank's other threads

/// Rows [begin, begin + count) of a full [rows, columns] tensor, stored in `matrix` from row `at`.
Parameter row_sharded(const std::string& name, int64_t rows, int64_t columns, Shard shard,
                      const WeightMatrix& matrix, int64_t at) {
  return {name,
          {rows, columns},
          {0, shard.begin, shard.count},
          matrix.offset + at * matrix.columns,
          matrix.columns};
}

/// Columns [begin, begin + count) of a full [rows, columns] tensor, stored from column `at`.
Parameter column_sharded(const std::string& name, int64_t rows, int64_t columns, Shard shard,
                         const WeightMatrix& matrix, int64_t at) {
  return {name, {rows, columns}, {1, shard.begin, shard.count}, matrix.offset + at, matrix.columns};
}

Shard times(Shard heads, int64_t head_dim) {
  return {heads.begin * head_dim, heads.count * head_dim};
}

}  // namespace

template <typename Add>
void ModelLayout::add_if(bool is_here, const Add& add) {
  const size_t first = parameters.size(), num_branches = branches.size();
  const int64_t before = size;
  add();
  if (is_here) return;
  for (size_t i = first; i < parameters.size(); ++i) {
    parameters[i].sharding.absent = true;
    parameters[i].offset = 0;
  }
  branches.resize(num_branches);
  size = before;
}

ModelLayout::ModelLayout(const ModelConfig& c, int tp, int rank, ExpertCoordinates coordinates,
                         const StageLayers& layers) {
  c.check(tp, coordinates.ep);
  const int64_t end = layers.count < 0 ? c.layers : layers.first + layers.count;
  if (layers.first < 0 || layers.first > end || end > c.layers) {
    throw ConfigError(fmt::format("stage of layers {} to {}: expected a range of 0 to {}",
                                  layers.first, end, c.layers));
  }
  if (c.tie_word_embeddings && layers.embedding != layers.head) {
    tied = layers.head ? TiedEmbedding::owner : TiedEmbedding::copy;
  }
  heads = c.heads / tp;
  kv_heads = std::max<int64_t>(1, c.kv_heads / tp);
  q = heads * c.head_dim;
  kv = kv_heads * c.head_dim;
  const Shard words = shard_of(c.vocab, tp, rank);
  vocab_begin = words.begin;
  vocab = words.count;

  const bool owns_embedding = tied == TiedEmbedding::none ? layers.embedding : layers.head;
  add_if(owns_embedding, [&] {
    embedding = {reserve(vocab * c.hidden), vocab, c.hidden};
    parameters.push_back(
        row_sharded("model.embed_tokens.weight", c.vocab, c.hidden, words, embedding, 0));
  });
  branches_per_layer = c.parallel_block ? 1 : 2;
  const auto is_here = [&](int64_t layer) { return layer >= layers.first && layer < end; };
  for (int64_t i = 0; i < c.layers; ++i) {
    add_if(is_here(i), [&] { add_layer(c, i, tp, rank); });
  }
  final_norm = size;
  add_if(layers.head, [&] {
    add_norm("model.norm.weight", c.hidden);
    head = embedding;
    if (c.tie_word_embeddings) return;
    head = {reserve(vocab * c.hidden), vocab, c.hidden};
    parameters.push_back(row_sharded("lm_head.weight", c.vocab, c.hidden, words, head, 0));
  });
  experts_begin = size;
  for (int64_t i = 0; i < c.layers; ++i) {
    if (!c.is_moe(i)) continue;
    BranchLayout elsewhere;
    BranchLayout& branch =
        is_here(i) ? branches[size_t((i - layers.first + 1) * branches_per_layer - 1)] : elsewhere;
    add_if(is_here(i), [&] { add_experts(c, tp, rank, coordinates, i, branch); });
  }
  experts_end = size;
  if (tied == TiedEmbedding::copy) embedding = {reserve(vocab * c.hidden), vocab, c.hidden};
}

void ModelLayout::add_layer(const ModelConfig& c, int64_t i, int tp, int rank) {
  const std::string layer = "model.layers." + std::to_string(i) + ".";
  add_branch(c, layer, tp, rank, true, c.parallel_block, c.parallel_block ? c.ffn : 0);
  branches.back().window = c.window(i);
  if (c.parallel_block) return;
  const bool moe = c.is_moe(i);
  add_branch(c, layer, tp, rank, false, !moe || c.shared_ffn > 0, moe ? c.shared_ffn : c.ffn, moe);
  if (!moe) return;
  branches.back().moe_layer = int(i / c.moe_layer_freq);
  add_router(c, layer, branches.back());
}

void ModelLayout::add_router(const ModelConfig& c, const std::string& layer, BranchLayout& b) {
  const ExpertNames names(c);
  b.moe = true;
  b.router = {reserve(c.experts * c.hidden), c.experts, c.hidden};
  parameters.push_back({layer + names.router,
                        {c.experts, c.hidden},
                        {.count = c.experts * c.hidden},
                        b.router.offset,
                        c.hidden});
  if (c.router_bias_update_rate == 0) return;
  b.router_bias = reserve(c.experts);
  parameters.push_back({.name = layer + names.router_bias,
                        .shape = {c.experts},
                        .sharding = {.count = c.experts},
                        .offset = b.router_bias,
                        .row_stride = 1,
                        .decay = false,
                        .initial = 0});
}

void ModelLayout::add_experts(const ModelConfig& c, int tp, int rank, ExpertCoordinates coordinates,
                              int64_t layer, BranchLayout& b) {
  const Shard here = shard_of(c.experts, coordinates.ep, coordinates.rank);
  const Shard shard = shard_of(c.ffn_per_expert(), tp, rank);
  const int64_t f = shard.count, whole = c.ffn_per_expert();
  b.experts_in = {reserve(here.count * 2 * f * c.hidden), here.count * 2 * f, c.hidden};
  b.experts_out = {reserve(here.count * c.hidden * f), here.count * c.hidden, f};
  const ExpertNames names(c);
  int holder = 0;  // EP rank that holds expert e
  for (int64_t e = 0; e < c.experts; ++e) {
    while (e >= shard_of(c.experts, coordinates.ep, holder).begin +
                    shard_of(c.experts, coordinates.ep, holder).count) {
      ++holder;
    }
    const std::string name = fmt::format("model.layers.{}.{}", layer, names.expert(e));
    const int64_t at = e - here.begin;
    const bool local = at >= 0 && at < here.count;
    const Shard stored = local ? shard : Shard{0, 0};
    const int64_t in = local ? at * 2 * f : 0, out = local ? at * c.hidden : 0;
    parameters.push_back(row_sharded(name + names.gate, whole, c.hidden, stored, b.experts_in, in));
    parameters.push_back(
        column_sharded(name + names.down, c.hidden, whole, stored, b.experts_out, 0));
    parameters.back().offset += out * f;
    parameters.push_back(
        row_sharded(name + names.up, whole, c.hidden, stored, b.experts_in, local ? in + f : 0));
    for (size_t i = parameters.size() - 3; i < parameters.size(); ++i) {
      parameters[i].sharding.ep_rank = holder;
    }
    parameters[parameters.size() - 3].begins_layer = local && at == 0;
  }
}

int64_t ModelLayout::reserve(int64_t elements) {
  const int64_t offset = size;
  size += (elements + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
}

void ModelLayout::add_norm(const std::string& name, int64_t hidden) {
  parameters.push_back({name, {hidden}, {.count = hidden}, reserve(hidden), 1, false});
}

void ModelLayout::add_branch(const ModelConfig& c, const std::string& layer, int tp, int rank,
                             bool attention, bool mlp, int64_t width, bool shared) {
  BranchLayout b;
  b.attention = attention;
  b.mlp = mlp;
  b.begin = size;
  b.ffn = mlp ? shard_of(width, tp, rank).count : 0;
  add_norm(layer + (attention ? "input_layernorm.weight" : "post_attention_layernorm.weight"),
           c.hidden);
  b.has_shared_gate = shared && mlp && c.shared_expert_gate;
  const int64_t in_rows = (attention ? q + 2 * kv : 0) + 2 * b.ffn + (b.has_shared_gate ? 1 : 0);
  const int64_t out_columns = (attention ? q : 0) + b.ffn;
  b.in = {reserve(in_rows * c.hidden), in_rows, c.hidden};
  b.out = {reserve(c.hidden * out_columns), c.hidden, out_columns};
  int64_t row = 0;
  const auto add_rows = [&](const std::string& name, int64_t whole, Shard shard) {
    parameters.push_back(row_sharded(layer + name, whole, c.hidden, shard, b.in, row));
    row += shard.count;
  };
  if (attention) {
    const Shard local_heads = shard_of(c.heads, tp, rank);
    // Adjacent ranks have the same key and value head if there are more ranks than heads.
    const Shard local_kv_heads =
        tp > c.kv_heads ? Shard{rank * c.kv_heads / tp, 1} : shard_of(c.kv_heads, tp, rank);
    const Shard local = times(local_heads, c.head_dim),
                local_kv = times(local_kv_heads, c.head_dim);
    add_rows("self_attn.q_proj.weight", c.heads * c.head_dim, local);
    add_rows("self_attn.k_proj.weight", c.kv_heads * c.head_dim, local_kv);
    add_rows("self_attn.v_proj.weight", c.kv_heads * c.head_dim, local_kv);
    parameters.push_back(column_sharded(layer + "self_attn.o_proj.weight", c.hidden,
                                        c.heads * c.head_dim, local, b.out, 0));
    add_attention_vectors(c, layer, local, local_kv, b);
  }
  if (mlp) {
    const Shard local = shard_of(width, tp, rank);
    const ExpertNames names(c);
    const std::string mlp_name = shared ? names.shared : "mlp.";
    add_rows(mlp_name + "gate_proj.weight", width, local);
    add_rows(mlp_name + "up_proj.weight", width, local);
    parameters.push_back(column_sharded(layer + mlp_name + "down_proj.weight", c.hidden, width,
                                        local, b.out, attention ? q : 0));
    if (b.has_shared_gate) {
      parameters.push_back({layer + names.shared_gate,
                            {1, c.hidden},
                            {.count = c.hidden},
                            b.in.offset + row * c.hidden,
                            c.hidden});
    }
  }
  branches.push_back(b);
}

void ModelLayout::add_attention_vectors(const ModelConfig& c, const std::string& layer, Shard local,
                                        Shard local_kv, BranchLayout& b) {
  const auto add = [&](const char* name, int64_t whole, const Sharding& sharding, int64_t offset,
                       float initial) {
    parameters.push_back({.name = fmt::format("{}self_attn.{}", layer, name),
                          .shape = {whole},
                          .sharding = sharding,
                          .offset = offset,
                          .row_stride = 1,
                          .decay = false,
                          .initial = initial});
  };
  if (c.qkv_bias) {
    b.qkv_bias = reserve(q + 2 * kv);
    const int64_t whole = c.kv_heads * c.head_dim;
    const Sharding kv_rows{0, local_kv.begin, local_kv.count};
    add("q_proj.bias", c.heads * c.head_dim, {0, local.begin, local.count}, b.qkv_bias, 0);
    add("k_proj.bias", whole, kv_rows, b.qkv_bias + q, 0);
    add("v_proj.bias", whole, kv_rows, b.qkv_bias + q + kv, 0);
  }
  if (c.qk_norm) {
    b.q_norm = reserve(2 * c.head_dim);
    add("q_norm.weight", c.head_dim, {.count = c.head_dim}, b.q_norm, 1);
    add("k_norm.weight", c.head_dim, {.count = c.head_dim}, b.q_norm + c.head_dim, 1);
  }
}

ExpertNames::ExpertNames(const ModelConfig& c) {
  const bool is_qwen = c.qkv_bias || c.qk_norm;
  prefix = is_qwen ? "mlp." : "block_sparse_moe.";
  router = prefix + "gate.weight";
  router_bias = prefix + "gate.e_score_correction_bias";
  shared = prefix + "shared_expert.";
  shared_gate = prefix + "shared_expert_gate.weight";
  gate = is_qwen ? "gate_proj.weight" : "w1.weight";
  up = is_qwen ? "up_proj.weight" : "w3.weight";
  down = is_qwen ? "down_proj.weight" : "w2.weight";
}

std::string ExpertNames::expert(int64_t index) const {
  return fmt::format("{}experts.{}.", prefix, index);
}

FlatWindow make_window(const ModelLayout& stage, FlatRange range, const ModelLayout& whole,
                       FlatRange whole_range) {
  FlatWindow window{whole_range.count, {}};
  std::vector<WindowRange> begins;
  for (size_t i = 0; i < stage.parameters.size(); ++i) {
    const FlatRange here = local_range(stage.parameters[i]);
    if (here.count == 0 || here.begin < range.begin || here.begin >= range.end()) continue;
    begins.push_back({here.begin - range.begin, whole.parameters[i].offset - whole_range.begin, 0});
  }
  std::ranges::sort(begins, {}, &WindowRange::local);
  auto& ranges = window.ranges;
  for (const auto& [local, at, count] : begins) {
    if (!ranges.empty() && ranges.back().whole - ranges.back().local == at - local) continue;
    if (!ranges.empty()) ranges.back().count = local - ranges.back().local;
    ranges.push_back({local, at, range.count - local});
  }
  return window;
}

void initialize_parameters(const Exec& exec, const ModelLayout& layout, const ModelConfig& config,
                           uint64_t seed, const Tensor& values) {
  const double residual = 1 / std::sqrt(2.0 * double(config.layers));
  for (const Parameter& p : layout.parameters) {
    const LocalShard shard = local_shard(p);
    const FlatRange range = local_range(p);
    const HostCopy local(exec, values.narrow(0, range.begin, range.count));
    float* const at = local.values().data();
    if (p.shape.size() == 1) {
      std::fill_n(at, shard.columns, p.initial);
      local.store();
      continue;
    }
    const uint64_t stream = stream_of(p.name.c_str());
    const float scale = float(0.02 * (p.sharding.tp_dim == 1 ? residual : 1));
#pragma omp parallel for schedule(static) if (range.count > kLongInitialization)
    for (int64_t i = 0; i < shard.rows; ++i) {
      for (int64_t j = 0; j < shard.columns; ++j) {
        const auto whole = uint64_t(shard.first + i * shard.whole_columns + j);
        at[i * shard.row_stride + j] = scale * normal(seed, stream, whole);
      }
    }
    local.store();
  }
}

}  // namespace tandem
