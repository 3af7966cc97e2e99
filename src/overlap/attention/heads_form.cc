// Form in which all-to-alls give each rank whole sequences of some heads and back (Ulysses, arXiv
// 2309.14509). Blocks are computed one by one, as in the other forms, so that bits agree; those
// whose rows have arrived do not wait for the others, and in the forward pass the result of a rank
// is sent while the next one is computed.
#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <vector>

#include "overlap/attention/exchange.h"

namespace tandem {

using namespace schedule;

namespace {

class HeadsForm final : public ContextForm {
 public:
  HeadsForm(Communicator& comm, const ContextGrid& grid, const RopeTable* rope)
      : grid_(grid),
        local_(local_heads(grid)),
        copies_(grid, rope),
        kernel_({grid.shape.batch, local_.shape.heads, local_.shape.kv_heads, grid.shape.head_dim,
                 2 * grid.max_key_chunk()}),
        queries_(local_.query_message({{grid.shape.dtype, local_.q_columns()}})),
        results_(local_.query_message(
            {{DType::f32, local_.shape.heads}, {grid.shape.dtype, local_.q_columns()}})),
        gradient_queries_(local_.query_message({{DType::f32, local_.shape.heads},  // log_sums
                                                {DType::f32, local_.shape.heads},  // delta
                                                {grid.shape.dtype, local_.q_columns()},
                                                {grid.shape.dtype, local_.q_columns()}})),
        keys_(local_.key_message(
            {{grid.shape.dtype, local_.kv_columns()}, {grid.shape.dtype, local_.kv_columns()}})),
        query_sums_(local_.query_message(
            {{DType::f32, local_.q_columns()}, {DType::f32, local_.shape.heads}})),
        key_sums_(local_.key_message(
            {{DType::f32, local_.kv_columns()}, {DType::f32, local_.kv_columns()}})),
        world_(size_t(grid.world)),
        query_area_(gradient_queries_.capacity(grid.max_query_chunk())),
        key_area_(keys_.capacity(grid.max_key_chunk())),
        query_sum_area_(query_sums_.capacity(grid.max_query_chunk())),
        key_sum_area_(key_sums_.capacity(grid.max_key_chunk())),
        arrived_(world_),
        sums_(world_ * (query_sum_area_ + key_sum_area_)),
        exchange_(comm, 2 * world_ * (query_area_ + key_area_),
                  2 * world_ * (query_area_ + key_area_), 4 * grid.world) {}

  static std::string refusal(const ContextGrid& grid) {
    if (grid.shape.kv_heads % grid.world == 0) return {};
    return fmt::format("kv_heads {}: expected a multiple of the {} ranks", grid.shape.kv_heads,
                       grid.world);
  }

  void forward(const ContextForward& call) override {
    exchange_.begin();
    const ContextRows rows = grid_.queries(grid_.rank);
    const auto pack = [&](int target) {
      const cpu::ChunkRows q = queries_.field(outgoing(kQueries, target), rows, 0);
      copies_.rotate_in(call.q, rows, target * local_.q_columns(), call.mask, q);
    };
    send_rows(queries_, pack, call.k, call.v, call.mask);
    for (int step = 0; step < grid_.world; ++step) {
      const int source = rs_owner(grid_.rank, grid_.world, step);
      const ContextRows of = grid_.queries(source);
      const cpu::ChunkRows out = query_sums_.field(query_sums(source), of, 0),
                           log_sums = query_sums_.field(query_sums(source), of, 1);
      fill(out, 0);
      fill(log_sums, -std::numeric_limits<float>::infinity());
      for (int k = 0; k < grid_.world; ++k) {
        const int owner = ag_source(source, grid_.world, k);
        const ContextBlock block = grid_.block(source, owner, call.mask.window);
        if (block.empty()) continue;
        await_rows(source);
        await_rows(owner);
        kernel_.forward(
            attention(owner, block, call.mask, queries_.field(incoming(kQueries, source), of, 0)),
            out, log_sums);
      }
      std::byte* const message = outgoing(kQueryResults, source);
      copy(log_sums, results_.field(message, of, 0));
      copy(out, results_.field(message, of, 1));
      if (source != grid_.rank) send(kQueryResults, source, results_, of);
    }
    await_all_rows();
    each_result(kQueryResults, [&](int source, std::byte* message) {
      copies_.log_sums_out(results_.field(message, rows, 0), rows, source * local_.shape.heads,
                           call.log_sums);
      copies_.copy_out(results_.field(message, rows, 1), rows, source * local_.q_columns(),
                       call.out);
    });
  }

  void backward(const ContextBackward& call) override {
    exchange_.begin();
    const ContextRows rows = grid_.queries(grid_.rank);
    const auto pack = [&](int target) {
      const int64_t head = target * local_.shape.heads, column = target * local_.q_columns();
      const auto field = [&](int index) {
        return gradient_queries_.field(outgoing(kQueries, target), rows, index);
      };
      copies_.log_sums_in(call.log_sums, rows, head, field(0));
      copies_.deltas(call.dout, call.out, rows, head, field(1));
      copies_.rotate_in(call.q, rows, column, call.mask, field(2));
      copies_.copy_in(call.dout, rows, column, field(3));
    };
    send_rows(gradient_queries_, pack, call.k, call.v, call.mask);
    for (int of = 0; of < grid_.world; ++of) {
      fill(query_sums_.field(query_sums(of), grid_.queries(of), 0), 0);
      for (const int i : {0, 1}) fill(key_sums_.field(key_sums(of), grid_.keys(of), i), 0);
    }
    for (int k = 0; k < grid_.world; ++k) {
      for (int step = 0; step < grid_.world; ++step) {
        const int source = ag_source(grid_.rank, grid_.world, step);
        const int owner = ag_source(source, grid_.world, k);
        const ContextBlock block = grid_.block(source, owner, call.mask.window);
        if (block.empty()) continue;
        await_rows(source);
        await_rows(owner);
        backward_block(source, owner, block, call.mask);
      }
    }
    await_all_rows();
    return_gradients(call);
  }

 private:
  enum Area : uint8_t { kQueries, kKeys, kQueryResults, kKeyResults };

  /// Waits for the rows of `source`, once in a pass.
  void await_rows(int source) {
    if (source == grid_.rank || arrived_[size_t(source)]) return;
    for (const Area area : {kQueries, kKeys}) await(area, source);
    arrived_[size_t(source)] = true;
  }
  void await_all_rows() {
    for (int source = 0; source < grid_.world; ++source) await_rows(source);
  }

  /// Shape of one rank's heads.
  static ContextGrid local_heads(ContextGrid grid) {
    grid.shape.heads /= grid.world;
    grid.shape.kv_heads /= grid.world;
    return grid;
  }

  size_t area_bytes(Area area) const {
    return area == kQueries || area == kQueryResults ? query_area_ : key_area_;
  }
  /// Byte offset of an area's message of, or for, `rank`, in shared memory and in scratch.
  size_t offset(Area area, int rank) const {
    const bool is_result = area == kQueryResults || area == kKeyResults;
    const bool is_keys = area == kKeys || area == kKeyResults;
    return world_ * ((is_result ? query_area_ + key_area_ : 0) + (is_keys ? query_area_ : 0)) +
           size_t(rank) * area_bytes(area);
  }
  std::byte* outgoing(Area area, int target) const {
    return exchange_.scratch() + offset(area, target);
  }
  std::byte* incoming(Area area, int source) const {
    return source == grid_.rank ? outgoing(area, source)
                                : exchange_.shared() + offset(area, source);
  }
  std::byte* query_sums(int of) const { return sums_.data() + size_t(of) * query_sum_area_; }
  std::byte* key_sums(int of) const {
    return sums_.data() + world_ * query_sum_area_ + size_t(of) * key_sum_area_;
  }
  void send(Area area, int target, const ChunkMessage& message, const ContextRows& rows) {
    exchange_.send(target, message, rows, outgoing(area, target), offset(area, grid_.rank),
                   area * grid_.world + grid_.rank);
  }
  void await(Area area, int source) { exchange_.await(area * grid_.world + source, source); }

  /// Sends each rank the rows of its heads; pack(target) writes those of queries.
  template <typename Pack>
  void send_rows(const ChunkMessage& queries, const Pack& pack, const Tensor& k, const Tensor& v,
                 const AttentionMask& mask) {
    std::fill(arrived_.begin(), arrived_.end(), false);
    const ContextRows keys = grid_.keys(grid_.rank);
    for (int step = 1; step <= grid_.world; ++step) {
      const int target = (grid_.rank + step) % grid_.world;
      pack(target);
      const int64_t column = target * local_.kv_columns();
      copies_.rotate_in(k, keys, column, mask, keys_.field(outgoing(kKeys, target), keys, 0));
      copies_.copy_in(v, keys, column, keys_.field(outgoing(kKeys, target), keys, 1));
      if (target == grid_.rank) continue;
      send(kQueries, target, queries, grid_.queries(grid_.rank));
      send(kKeys, target, keys_, keys);
    }
  }

  cpu::AttentionBlock attention(int owner, const ContextBlock& block, const AttentionMask& mask,
                                const cpu::ChunkRows& q) const {
    const ContextRows keys = grid_.keys(owner);
    return grid_.attention(block, mask, q, keys_.field(incoming(kKeys, owner), keys, 0),
                           keys_.field(incoming(kKeys, owner), keys, 1));
  }

  void backward_block(int source, int owner, const ContextBlock& block, const AttentionMask& mask) {
    const ContextRows rows = grid_.queries(source), keys = grid_.keys(owner);
    const auto field = [&](int index) {
      return gradient_queries_.field(incoming(kQueries, source), rows, index);
    };
    kernel_.backward(
        attention(owner, block, mask, field(2)),
        {field(3), field(0), field(1), query_sums_.field(query_sums(source), rows, 0),
         key_sums_.field(key_sums(owner), keys, 0), key_sums_.field(key_sums(owner), keys, 1)});
  }

  void return_gradients(const ContextBackward& call) {
    const ContextRows rows = grid_.queries(grid_.rank), local_keys = grid_.keys(grid_.rank);
    for (int step = 1; step <= grid_.world; ++step) {
      const int target = (grid_.rank + step) % grid_.world;
      const ContextRows queries = grid_.queries(target), keys = grid_.keys(target);
      const cpu::ChunkRows dq = query_sums_.field(query_sums(target), queries, 0),
                           dk = key_sums_.field(key_sums(target), keys, 0);
      copies_.rotate_back(dq, queries, call.mask);
      copies_.rotate_back(dk, keys, call.mask);
      copy(dq, queries_.field(outgoing(kQueryResults, target), queries, 0));
      copy(dk, keys_.field(outgoing(kKeyResults, target), keys, 0));
      copy(key_sums_.field(key_sums(target), keys, 1),
           keys_.field(outgoing(kKeyResults, target), keys, 1));
      if (target == grid_.rank) continue;
      send(kQueryResults, target, queries_, queries);
      send(kKeyResults, target, keys_, keys);
    }
    each_result(kQueryResults, [&](int source, std::byte* message) {
      copies_.copy_out(queries_.field(message, rows, 0), rows, source * local_.q_columns(),
                       call.dq);
    });
    each_result(kKeyResults, [&](int source, std::byte* message) {
      const int64_t column = source * local_.kv_columns();
      copies_.copy_out(keys_.field(message, local_keys, 0), local_keys, column, call.dk);
      copies_.copy_out(keys_.field(message, local_keys, 1), local_keys, column, call.dv);
    });
  }

  /// Calls body(rank that computed it, message) for this rank's results.
  template <typename Body>
  void each_result(Area area, const Body& body) {
    for (int step = 0; step < grid_.world; ++step) {
      const int source = ag_source(grid_.rank, grid_.world, step);
      if (source != grid_.rank) await(area, source);
      body(source, incoming(area, source));
    }
  }

  ContextGrid grid_, local_;
  ContextRowCopies copies_;
  cpu::BlockAttention kernel_;
  ChunkMessage queries_, results_, gradient_queries_, keys_, query_sums_, key_sums_;
  size_t world_, query_area_, key_area_, query_sum_area_, key_sum_area_;
  std::vector<bool> arrived_;
  Memory sums_;
  ContextExchange exchange_;
};

}  // namespace

constinit const ContextFormRow kHeadsForm{
    "heads", Strategy::overlapped, HeadsForm::refusal,
    [](Communicator& comm, const ContextGrid& grid, const RopeTable* rope)
        -> std::unique_ptr<ContextForm> { return std::make_unique<HeadsForm>(comm, grid, rope); }};

}  // namespace tandem
