#include "engine/model/layout.h"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "tandem/collectives.h"
#include "tandem/error.h"

namespace tandem {
namespace {

constexpr int64_t kAlignment = 32;  // elements: whole cache lines in f32 and in bf16

/// A rank's shard of a weight, which begins at `offset`. `row_stride`: of one sharded by columns.
Parameter make_parameter(const program::Weight& w, std::string name, int64_t offset,
                         int64_t row_stride, int tp, int rank) {
  Parameter p{.name = std::move(name),
              .shape = {w.rows.count()},
              .sharding = {.count = w.elements()},
              .offset = offset,
              .row_stride = 1,
              .decay = !w.is_vector(),
              .initial = w.initial};
  const bool by_columns = w.columns.division != program::Division::whole;
  if (!w.is_vector()) p.shape.push_back(w.columns.count());
  if (!w.is_vector()) p.row_stride = by_columns ? row_stride : w.columns.count();
  if (by_columns || w.rows.division != program::Division::whole) {
    const Shard shard = (by_columns ? w.columns : w.rows).on_rank(tp, rank);
    p.sharding = {by_columns ? 1 : 0, shard.begin, shard.count};
  }
  return p;
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

  const auto add_words = [&](const char* name, const WeightMatrix& matrix) {
    const program::Weight w{name, {c.vocab, 1, program::Division::divided}, {c.hidden}};
    parameters.push_back(make_parameter(w, w.name, matrix.offset, c.hidden, tp, rank));
  };
  const bool owns_embedding = tied == TiedEmbedding::none ? layers.embedding : layers.head;
  add_if(owns_embedding, [&] {
    embedding = {reserve(vocab * c.hidden), vocab, c.hidden};
    add_words("model.embed_tokens.weight", embedding);
  });
  branches_per_layer = c.parallel_block ? 1 : 2;
  const auto is_here = [&](int64_t layer) { return layer >= layers.first && layer < end; };
  for (int64_t i = 0; i < c.layers; ++i) {
    add_if(is_here(i), [&] {
      const std::string layer = fmt::format("model.layers.{}.", i);
      for (auto& branch : program::make_layer(c, i).branches) {
        add_branch(std::move(branch), layer, tp, rank);
      }
      if (branches.back().moe) branches.back().moe_layer = int(i / c.moe_layer_freq);
    });
  }
  final_norm = size;
  add_if(layers.head, [&] {
    parameters.push_back({"model.norm.weight",
                          {c.hidden},
                          {.count = c.hidden},
                          reserve(c.hidden),
                          1,
                          false,
                          c.initial_norm()});
    head = embedding;
    if (c.tie_word_embeddings) return;
    head = {reserve(vocab * c.hidden), vocab, c.hidden};
    add_words("lm_head.weight", head);
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

void ModelLayout::add_branch(program::BranchProgram program, const std::string& layer, int tp,
                             int rank) {
  BranchLayout b;
  b.program = std::move(program);
  b.begin = size;
  b.attention = b.program.find(program::kAttention);
  b.mlp = b.program.find(program::kSwiglu);
  b.moe = b.program.find(program::kExperts);
  for (const program::Value& value : b.program.values) {
    Shard columns{0, value.columns.on_rank(tp, rank).count};
    if (value.range_of >= 0) {
      columns.begin = b.columns[size_t(value.range_of)].count;
      b.columns[size_t(value.range_of)].count += columns.count;
      const bool is_whole = value.columns.division == program::Division::whole;
      if (is_whole && value.range_of == program::kHidden) b.whole_rows += columns.count;
    }
    b.columns.push_back(columns);
  }
  assign_offsets(b, tp, rank);
  const size_t first = parameters.size();
  for (size_t i = 0; i < b.offsets.size(); ++i) {
    if (b.offsets[i] < 0) continue;
    const program::Weight& w = b.program.weights[i];
    parameters.push_back(make_parameter(w, layer + w.name, b.offsets[i], b.out.columns, tp, rank));
  }
  parameters[first].begins_layer = !b.has_norm();
  branches.push_back(std::move(b));
}

/// The norm, if it is before the branch, the matrices of the two GEMMs, then the weights of the
/// other operations.
void ModelLayout::assign_offsets(BranchLayout& b, int tp, int rank) {
  const program::BranchProgram& program = b.program;
  const int64_t hidden = program.columns(program::kXNorm).count();
  b.offsets.assign(program.weights.size(), -1);
  const auto local = [&](size_t weight) {
    return program.weights[weight].rows.on_rank(tp, rank).count;
  };
  const auto assign = [&](const program::Op& op) {
    int64_t elements = 0;  // of vectors
    for (const size_t i : op.weights) {
      const program::Weight& w = program.weights[i];
      if (w.is_vector()) elements += local(i);
      if (!w.is_vector() && b.offsets[i] < 0) b.offsets[i] = reserve(w.elements());
    }
    int64_t at = elements == 0 ? 0 : reserve(elements);
    for (const size_t i : op.weights) {
      if (program.weights[i].is_vector()) b.offsets[i] = std::exchange(at, at + local(i));
    }
  };
  assign(program.ops.front());
  const int64_t rows = b.columns[program::kHidden].count, inner = b.columns[program::kInner].count;
  b.in = {reserve(rows * hidden), rows, hidden};
  b.out = {reserve(hidden * inner), hidden, inner};
  if (b.has_products()) {
    int64_t row = 0, column = 0;
    for (const size_t i : program.find(program::kColumnGemm)->weights) {
      b.offsets[i] = b.in.offset + std::exchange(row, row + local(i)) * hidden;
    }
    for (size_t i = 0; i < program.weights.size(); ++i) {
      if (!program.weights[i].in_projection) continue;
      b.offsets[i] = b.in.offset + row++ * hidden;
    }
    for (const size_t i : program.find(program::kRowGemm)->weights) {
      b.offsets[i] = b.out.offset + column;
      column += program.weights[i].columns.on_rank(tp, rank).count;
    }
  }
  for (const program::Op& op : program.ops) {
    if (op.row == &program::kRmsNorm || op.row == &program::kExperts) continue;
    assign(op);
    if (op.row != &program::kRouter) continue;
    b.router = {b.offset(op), program.weights[op.weights[0]].rows.count(), hidden};
    if (op.weights.size() > 1) b.router_bias = b.offsets[op.weights[1]];
  }
}

void ModelLayout::add_experts(const ModelConfig& c, int tp, int rank, ExpertCoordinates coordinates,
                              int64_t layer, BranchLayout& b) {
  const Shard here = shard_of(c.experts, coordinates.ep, coordinates.rank);
  const int64_t f = shard_of(c.ffn_per_expert(), tp, rank).count;
  b.experts_in = {reserve(here.count * 2 * f * c.hidden), here.count * 2 * f, c.hidden};
  b.experts_out = {reserve(here.count * c.hidden * f), here.count * c.hidden, f};
  if (c.expert_bias) b.experts_bias = {reserve(here.count * 2 * f), here.count, 2 * f};
  const program::BranchProgram moe = program::make_layer(c, layer).branches.back();
  int holder = 0;  // EP rank that holds expert e
  for (int64_t e = 0; e < c.experts; ++e) {
    while (e >= shard_of(c.experts, coordinates.ep, holder).begin +
                    shard_of(c.experts, coordinates.ep, holder).count) {
      ++holder;
    }
    const bool local = e >= here.begin && e < here.begin + here.count;
    const int64_t at = local ? e - here.begin : 0;
    const auto add = [&](size_t matrix, int64_t offset) {
      const program::Weight& w = moe.weights[moe.find(program::kExperts)->weights[matrix]];
      Parameter p = make_parameter(w, fmt::format("model.layers.{}.{}", layer, w.name_of(e)),
                                   offset, f, tp, rank);
      if (!local) p.sharding.begin = p.sharding.count = 0;
      p.sharding.ep_rank = holder;
      p.begins_layer = local && at == 0 && matrix == 0;
      parameters.push_back(std::move(p));
    };
    const int64_t gate = b.experts_in.offset + at * 2 * f * c.hidden;
    add(0, gate);
    add(1, b.experts_out.offset + at * c.hidden * f);
    add(2, local ? gate + f * c.hidden : gate);
    if (!c.expert_bias) continue;
    const int64_t bias = b.experts_bias.offset + at * 2 * f;
    add(3, bias);
    add(4, local ? bias + f : bias);
  }
}

int64_t ModelLayout::reserve(int64_t elements) {
  const int64_t offset = size;
  size += (elements + kAlignment - 1) / kAlignment * kAlignment;
  return offset;
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

}  // namespace tandem
