#include "engine/plan/chakra.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "core/formats/protobuf.h"
#include "core/system/json.h"
#include "engine/parallel/dims.h"
#include "schedule/pipeline.h"

namespace tandem::plan {
namespace {

using schedule::PassKind;
using schedule::PipelineAction;
using schedule::PipelineShape;

// Numbers of NodeType and CollectiveCommType in the schema.
enum class NodeType : uint8_t { compute = 4, send = 5, receive = 6, collective = 7 };
enum class Collective : uint8_t {
  all_reduce = 0,
  all_gather = 2,
  all_to_all = 6,
  reduce_scatter = 7
};

ParallelDims dims_of(const RunRow& row) {
  return {int(row.tp), int(row.dp), int(row.ep), int(row.pp)};
}

/// Number of a rank's group along the axes, different for all groups of a layout.
int group_id(const ParallelDims& dims, Axes axes, int rank) {
  int first = 1;
  for (const Axes& other : {kTp, kExperts, kDp, kExpertDp}) {
    if (other == axes) break;
    first += dims.ranks() / dims.size(other);
  }
  return first + dims.group(axes, rank);
}

// Numbers of AttributeProto's fields.
constexpr int kInt32 = 7, kInt64 = 9, kUint64 = 13, kBool = 27, kString = 29;

std::string named(std::string_view name) {
  std::string attribute;
  append_counted(attribute, 1, name);
  return attribute;
}
void append_attribute(std::string& node, std::string_view name, int type, uint64_t value) {
  std::string attribute = named(name);
  append_number(attribute, type, value);
  append_counted(node, 10, attribute);
}
void append_attribute(std::string& node, std::string_view name, std::string_view value) {
  std::string attribute = named(name);
  append_counted(attribute, kString, value);
  append_counted(node, 10, attribute);
}

/// Kinds of nodes by the term of the step that their durations add up to.
enum class NodeKind : uint8_t { layer, head, tp, ep, stage, gradients, optimizer, fixed };
constexpr size_t kNodeKinds = 8;

struct TraceNode {
  NodeType type;
  NodeKind kind;
  std::string name;
  double seconds = 0;
  std::string attributes;
};

/// Writes nodes one after another.
class TraceWriter {
 public:
  explicit TraceWriter(std::string_view metadata) {
    append_varint(bytes_, metadata.size());
    bytes_ += metadata;
  }

  uint64_t add(const TraceNode& node, std::vector<uint64_t> ctrl_deps,
               const std::vector<uint64_t>& data_deps = {}) {
    const uint64_t id = next_id_++;
    std::string text;
    append_number(text, 1, id);
    append_counted(text, 2, node.name);
    append_number(text, 3, uint64_t(node.type));
    append_ids(text, 4, ctrl_deps);
    append_ids(text, 5, data_deps);
    // Whole microseconds whose sum over a kind's nodes is that of their seconds.
    double& left = left_us_[size_t(node.kind)];
    left += 1e6 * node.seconds;
    const double whole = std::max(0.0, std::round(left));
    left -= whole;
    append_number(text, 7, uint64_t(whole));
    text += node.attributes;
    append_varint(bytes_, text.size());
    bytes_ += text;
    return id;
  }
  std::string take() { return std::move(bytes_); }

 private:
  static void append_ids(std::string& to, int field, const std::vector<uint64_t>& ids) {
    std::string packed;
    for (const uint64_t id : ids) append_varint(packed, id);
    if (!packed.empty()) append_counted(to, field, packed);
  }

  std::string bytes_;
  uint64_t next_id_ = 1;
  std::array<double, kNodeKinds> left_us_{};
};

/// Exchanges of a pass of a layer, before or after its kernels, or of a stage's weights.
struct Message {
  double seconds = 0, bytes = 0;
};

/// Sizes and seconds of a layout's nodes.
class StepNodes {
 public:
  explicit StepNodes(const ChakraParams& params)
      : row(params.layout.row),
        factors(params.factors),
        codec(params.layout.formats.codec),
        raw(work_of(row, params.gpu)),
        exchanges(exchanges_of(row, params.gpu, raw, params.formatted_sums)),
        work(work_in_formats(row, params.gpu, raw, exchanges, params.layout.formats)),
        sums(params.formatted_sums),
        time(step_time(work, factors)),
        gpu(params.gpu) {}

  double factor(Term term) const { return factors[size_t(term)]; }

  /// Forward passes in a pass, in work: the backward pass counts as two.
  double passes_of(PassKind pass) const {
    switch (pass) {
      case PassKind::forward:
        return 1;
      case PassKind::backward:
        return 2 + work.recompute;
      case PassKind::backward_input:
        return 1 + work.recompute;
      case PassKind::backward_weight:
        return 1;
    }
    return 0;
  }

  TraceNode compute(NodeKind kind, std::string name, double seconds, double flops,
                    double bytes) const {
    TraceNode node{NodeType::compute, kind, std::move(name), seconds, {}};
    append_attribute(node.attributes, "is_cpu_op", kBool, 0);
    append_attribute(node.attributes, "num_ops", kInt64, uint64_t(std::llround(flops)));
    append_attribute(node.attributes, "tensor_size", kUint64, uint64_t(std::llround(bytes)));
    return node;
  }
  TraceNode layer(PassKind pass) const {
    const double share = passes_of(pass) / (3 + work.recompute);
    const LayerWork& of_layer = work.layer;
    return compute(NodeKind::layer, "layer", share * layer_seconds(of_layer, factors),
                   share * (of_layer.gemm + of_layer.attention) * gpu.bf16_flops,
                   share * (of_layer.gemm_bytes + of_layer.memory) * gpu.memory_rate);
  }
  TraceNode head(PassKind pass) const {
    const double share = (pass == PassKind::backward ? 2 : 1) / 3.0;
    return compute(NodeKind::head, "head", share * head_seconds(work, factors),
                   share * work.head_gemm * gpu.bf16_flops,
                   share * work.head_bytes * gpu.memory_rate);
  }

  TraceNode collective(NodeKind kind, std::string name, Collective type, const Message& message,
                       int group) const {
    TraceNode node{NodeType::collective, kind, std::move(name), message.seconds, {}};
    append_attribute(node.attributes, "is_cpu_op", kBool, 0);
    append_attribute(node.attributes, "comm_type", kInt64, uint64_t(type));
    append_attribute(node.attributes, "comm_size", kInt64, uint64_t(std::llround(message.bytes)));
    append_attribute(node.attributes, "pg_name", fmt::format("{}", group));
    return node;
  }
  TraceNode transfer(bool sends, int from, int to, int tag) const {
    const double messages = 2 * std::max(1.0, row.vpp);  // of a microbatch and rank
    const double bytes = 2 * exchanges.stages.elements / messages * ratio(codec.stages, 2);
    TraceNode node{sends ? NodeType::send : NodeType::receive,
                   NodeKind::stage,
                   sends ? "send" : "receive",
                   sends ? factor(Term::pp) * work.pp / messages : 0,
                   {}};
    append_attribute(node.attributes, "is_cpu_op", kBool, 0);
    append_attribute(node.attributes, "comm_size", kInt64, uint64_t(std::llround(bytes)));
    append_attribute(node.attributes, "comm_src", kInt32, uint64_t(from));
    append_attribute(node.attributes, "comm_dst", kInt32, uint64_t(to));
    append_attribute(node.attributes, "comm_tag", kInt32, uint64_t(tag));
    return node;
  }

  /// Two sums of a forward pass, each a gather before the kernels and a reduce-scatter after them,
  /// as many in a backward pass, and those of the recomputation.
  Message tp_gathers(PassKind pass) const { return tp_messages(2 * tp_rounds(pass), 0); }
  Message tp_scatters(PassKind pass) const {
    const double forward = pass == PassKind::forward ? 1 : recomputes(pass),
                 encoded = sums * forward;
    const double others = 2 * tp_rounds(pass) - encoded;
    return tp_messages(others, encoded);
  }
  /// One of dispatch and combine.
  Message ep_message(PassKind pass) const {
    const double bytes = exchanges.ep.elements;  // 2 an element, in two messages
    if (pass != PassKind::forward) return {factor(Term::ep) * exchanges.ep_left / 2, bytes};
    return {factor(Term::ep) * encoded_seconds(exchanges.ep, codec.experts, gpu) / 2,
            bytes * ratio(codec.experts, 2)};
  }
  bool has_exchanges(PassKind pass) const { return pass != PassKind::backward_weight; }

  static double ratio(const Wire& wire, double element_bytes) {
    return bytes_per_element(wire, element_bytes) / element_bytes;
  }

  const RunRow& row;
  const Factors& factors;
  const CodecPolicy& codec;
  const StepWork raw;
  const LayoutExchanges exchanges;
  const StepWork work;
  const double sums;
  const StepTime time;
  const GpuSpec& gpu;

 private:
  double recomputes(PassKind pass) const { return pass == PassKind::forward ? 0 : work.recompute; }
  double tp_rounds(PassKind pass) const { return 1 + recomputes(pass); }
  Message tp_messages(double uncompressed, double encoded) const {
    const double all_encoded = sums * (1 + work.recompute),
                 all_others = 2 * (4 + 2 * work.recompute) - all_encoded;
    const double of_each = exchanges.tp_left / all_others,
                 of_encoded = encoded_seconds(exchanges.tp, codec.attention, gpu) / all_encoded;
    const double tensor = 2 * row.mbs * row.seq / row.cp * row.hidden;
    return {factor(Term::tp) * (uncompressed * of_each + encoded * of_encoded),
            tensor * (uncompressed + encoded * ratio(codec.attention, 2))};
  }
};

/// Trace of one rank.
class RankTrace {
 public:
  RankTrace(const ChakraParams& params, int rank)
      : nodes_(params),
        dims_(dims_of(params.layout.row)),
        shape_(pipeline_shape_of(params.layout.row)),
        rank_(rank),
        zero_(params.layout.formats.zero),
        trace_(metadata(params, rank)) {}

  std::string write() {
    const int pp_rank = rank_ / (dims_.tp() * dims_.dp());
    const auto actions = schedule::pipeline_actions(shape_, pp_rank);
    forward_.assign(size_t(shape_.chunks) * size_t(shape_.microbatches), 0);
    std::vector<int> left(size_t(shape_.microbatches), shape_.chunks);
    for (const PipelineAction& action : actions) {
      add_pass(action, stage_of(shape_, pp_rank, action.chunk));
      const bool is_last =
          action.pass == PassKind::backward || action.pass == PassKind::backward_weight;
      if (is_last && --left[size_t(action.microbatch)] == 0 && zero_ == 2) add_gradient_sums();
    }
    if (zero_ != 2) add_gradient_sums();
    add_update();
    return trace_.take();
  }

 private:
  static std::string metadata(const ChakraParams& params, int rank) {
    const RunRow& row = params.layout.row;
    std::string text;
    append_counted(text, 1, "0.0.4");
    const std::string layout =
        fmt::format("{} zero {} codec {}", dims_of(row).describe(), params.layout.formats.zero,
                    params.layout.formats.codec.describe());
    for (const auto& [name, value] : std::array<std::pair<std::string_view, std::string>, 2>{
             {{"layout", layout}, {"rank", fmt::format("{}", rank)}}}) {
      std::string attribute = named(name);
      append_counted(attribute, kString, value);
      append_counted(text, 2, attribute);
    }
    return text;
  }

  /// Adds a node after the last one of the rank's passes.
  void chain(const TraceNode& node, const std::vector<uint64_t>& data_deps = {}) {
    last_ = trace_.add(node, last_ == 0 ? std::vector<uint64_t>{} : std::vector{last_}, data_deps);
  }

  /// Rank with the stage in this rank's pipeline.
  int rank_of(int stage) const {
    const int ranks = dims_.tp() * dims_.dp();
    return rank_ % ranks + ranks * position_of(shape_, stage).rank;
  }
  /// Tag of the transfer of a microbatch from a stage to the next or the one before.
  int tag_of(int microbatch, int from, bool is_forward) const {
    return (microbatch * shape_.stages() + from) * 2 + (is_forward ? 0 : 1);
  }

  void add_pass(const PipelineAction& action, int stage) {
    const bool is_forward = action.pass == PassKind::forward;
    const bool is_last_stage = stage + 1 == shape_.stages();
    const bool transfers = nodes_.has_exchanges(action.pass);
    const int before = is_forward ? stage - 1 : stage + 1,
              after = is_forward ? stage + 1 : stage - 1;
    const auto has = [&](int other) {
      return other >= 0 && other < shape_.stages() && rank_of(other) != rank_;
    };
    uint64_t& forward =
        forward_[size_t(action.chunk) * size_t(shape_.microbatches) + size_t(action.microbatch)];
    std::vector<uint64_t> needs;
    if (!is_forward) needs.push_back(forward);
    if (transfers && has(before)) {
      needs.push_back(trace_.add(nodes_.transfer(false, rank_of(before), rank_,
                                                 tag_of(action.microbatch, before, is_forward)),
                                 {}));
    }
    if (!is_forward && is_last_stage) chain(nodes_.head(action.pass), std::exchange(needs, {}));
    const int layers = int(std::lround(nodes_.work.stage_layers)) / shape_.chunks;
    for (int i = 0; i < layers; ++i) {
      add_layer(action.pass, std::exchange(needs, {}));
    }
    if (is_forward && is_last_stage) chain(nodes_.head(action.pass));
    if (is_forward) forward = last_;
    if (transfers && has(after)) {
      trace_.add(nodes_.transfer(true, rank_, rank_of(after),
                                 tag_of(action.microbatch, stage, is_forward)),
                 {}, {last_});
    }
  }

  void add_layer(PassKind pass, std::vector<uint64_t> needs) {
    const RunRow& row = nodes_.row;
    const bool exchanges = nodes_.has_exchanges(pass);
    const auto tp = [&](const char* name, Collective type, const Message& message) {
      chain(nodes_.collective(NodeKind::tp, name, type, message, group_id(dims_, kTp, rank_)),
            std::exchange(needs, {}));
    };
    const auto ep = [&](const char* name) {
      chain(nodes_.collective(NodeKind::ep, name, Collective::all_to_all, nodes_.ep_message(pass),
                              group_id(dims_, kExperts, rank_)),
            std::exchange(needs, {}));
    };
    if (exchanges && row.tp > 1)
      tp("tp all_gather", Collective::all_gather, nodes_.tp_gathers(pass));
    if (exchanges && row.ep > 1) ep("ep dispatch");
    chain(nodes_.layer(pass), needs);
    if (exchanges && row.ep > 1) ep("ep combine");
    if (exchanges && row.tp > 1)
      tp("tp reduce_scatter", Collective::reduce_scatter, nodes_.tp_scatters(pass));
  }

  /// Calls use(weights, seconds of a byte of each, axes, name) for dense weights and experts.
  template <class Use>
  void for_weights(const Use& use) const {
    const RankWeights weights = rank_weights(nodes_.row);
    const WeightCopies copies = weight_copies(nodes_.row);
    const auto rings = weight_rings(nodes_.row, nodes_.gpu);
    const double dense = ring_seconds(rings[0], 1, nodes_.gpu),
                 experts = ring_seconds(rings[1], 1, nodes_.gpu);
    if (copies.dense > 1) use(weights.dense, dense / (dense + experts), kDp, "dp");
    if (copies.experts > 1 && weights.experts > 0)
      use(weights.experts, experts / (dense + experts), kExpertDp, "expert_dp");
  }

  /// Share of the exchanges' time that gathers of weights take.
  double gather_share() const {
    if (zero_ == 0 || nodes_.work.dp == 0) return 0;
    return encoded_seconds(nodes_.exchanges.weights, nodes_.codec.weights, nodes_.gpu) /
           nodes_.work.dp;
  }

  void add_gradient_sums() {
    const double times = zero_ == 2 ? shape_.microbatches : 1;
    const double seconds = nodes_.time.exposed_dp * (1 - gather_share()) / times;
    for_weights([&](double weights, double share, Axes axes, const char* name) {
      const Message message{seconds * share,
                            4 * weights * StepNodes::ratio(nodes_.codec.gradients, 4)};
      const TraceNode node =
          nodes_.collective(NodeKind::gradients, fmt::format("{} gradients", name),
                            zero_ == 0 ? Collective::all_reduce : Collective::reduce_scatter,
                            message, group_id(dims_, axes, rank_));
      sums_.push_back(trace_.add(node, {}, {last_}));
    });
  }

  void add_update() {
    chain(nodes_.compute(NodeKind::optimizer, "optimizer", nodes_.time.optimizer, 0,
                         nodes_.work.optimizer * nodes_.gpu.memory_rate),
          sums_);
    if (zero_ != 0) {
      for_weights([&](double weights, double share, Axes axes, const char* name) {
        chain(nodes_.collective(NodeKind::gradients, fmt::format("{} weights", name),
                                Collective::all_gather,
                                {nodes_.time.exposed_dp * gather_share() * share,
                                 2 * weights * StepNodes::ratio(nodes_.codec.weights, 2)},
                                group_id(dims_, axes, rank_)));
      });
    }
    chain(nodes_.compute(NodeKind::fixed, "fixed", nodes_.time.fixed, 0, 0));
  }

  const StepNodes nodes_;
  const ParallelDims dims_;
  const PipelineShape shape_;
  const int rank_, zero_;
  TraceWriter trace_;
  uint64_t last_ = 0;              ///< node of the rank's passes
  std::vector<uint64_t> forward_;  ///< last nodes of forward passes, by chunk and microbatch
  std::vector<uint64_t> sums_;     ///< of gradients
};

}  // namespace

std::vector<int> chakra_ranks(const RunRow& row, int max_ranks) {
  const ParallelDims dims = dims_of(row);
  std::vector<int> ranks;
  const int step = dims.ranks() <= max_ranks ? 1 : dims.tp() * dims.dp();
  for (int rank = 0; rank < dims.ranks(); rank += step) ranks.push_back(rank);
  return ranks;
}

std::string chakra_trace(const ChakraParams& params, int rank) {
  return RankTrace(params, rank).write();
}

std::string chakra_groups(const RunRow& row, const std::vector<int>& ranks) {
  const ParallelDims dims = dims_of(row);
  std::map<int, std::vector<int>> groups;
  for (const int rank : ranks) {
    for (const Axes& axes : {kTp, kExperts, kDp, kExpertDp})
      groups[group_id(dims, axes, rank)] = dims.members(axes, rank);
  }
  nlohmann::ordered_json json;
  for (const auto& [id, members] : groups) json[fmt::format("{}", id)] = members;
  return dump_json(json) + "\n";
}

}  // namespace tandem::plan
