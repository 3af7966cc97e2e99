// Form in which all-to-alls give each rank whole sequences of some heads and back (Ulysses, arXiv
// 2309.14509). Slices of blocks are computed one by one, as in the other forms, so that bits agree;
// those whose rows have arrived do not wait for the others, and in the forward pass the result of a
// rank is sent while the next one is computed.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <limits>
#include <vector>

#include "overlap/attention/exchange.h"

namespace tandem {

using schedule::ag_source;
using schedule::ContextBlock;
using schedule::ContextRows;
using schedule::rs_owner;

namespace {

/// Messages of the passes, and bytes that the form allocates for them.
struct HeadsLayout {
  explicit HeadsLayout(const ContextGrid& grid)
      : local(local_heads(grid)),
        queries(local.query_message({{grid.shape.dtype, local.q_columns()}})),
        results(local.query_message(
            {{DType::f32, local.shape.heads}, {grid.shape.dtype, local.q_columns()}})),
        gradient_queries(local.query_message({{DType::f32, local.shape.heads},  // log_sums
                                              {DType::f32, local.shape.heads},  // delta
                                              {grid.shape.dtype, local.q_columns()},
                                              {grid.shape.dtype, local.q_columns()}})),
        keys(local.keys_and_values()),
        // out with log-sums; or dq, and dq of the rank's own keys
        query_sums(local.query_message({{DType::f32, local.q_columns()},
                                        {DType::f32, local.shape.heads},
                                        {DType::f32, local.q_columns()}})),
        // dk and dv of other ranks' queries, and of the keys' own
        key_sums(local.key_message({{DType::f32, local.kv_columns()},
                                    {DType::f32, local.kv_columns()},
                                    {DType::f32, local.kv_columns()},
                                    {DType::f32, local.kv_columns()}})),
        query_area(gradient_queries.capacity(grid.max_query_chunk())),
        key_area(keys.sent.capacity(grid.max_key_chunk())),
        key_gradient_area(keys.rows.capacity(grid.max_key_chunk())),
        decoded(keys.decoded_bytes(grid.max_key_chunk())),
        query_sum_area(query_sums.capacity(grid.max_query_chunk())),
        key_sum_area(key_sums.capacity(grid.max_key_chunk())),
        sums(size_t(grid.world + 1) * query_sum_area + size_t(grid.world) * key_sum_area),
        exchanged(size_t(grid.world) * (2 * query_area + key_area + key_gradient_area)) {}
  static size_t bytes(const ContextGrid& grid) {
    const HeadsLayout layout(grid);
    return ContextExchange::bytes(layout.exchanged, layout.exchanged) + layout.sums +
           size_t(grid.world) * layout.decoded +
           cpu::BlockAttention::bytes(layout.local.block_shape());
  }
  /// The rows of the other ranks' heads, and results with log-sums back; backward: q, dout,
  /// log-sums, deltas, k and v, and dq, dk and dv back.
  static int64_t sent_bytes(ContextPass pass, const ContextGrid& grid, int64_t) {
    const HeadsLayout layout(grid);
    const bool is_forward = pass == ContextPass::forward;
    size_t bytes = 0;
    for (int other = 0; other < grid.world; ++other) {
      if (other == grid.rank) continue;
      const ContextRows rows = grid.queries(grid.rank), returned = grid.queries(other);
      bytes += layout.keys.sent.bytes(grid.keys(grid.rank));
      bytes += is_forward ? layout.queries.bytes(rows) + layout.results.bytes(returned)
                          : layout.gradient_queries.bytes(rows) + layout.queries.bytes(returned) +
                                layout.keys.rows.bytes(grid.keys(other));
    }
    return int64_t(bytes);
  }

  /// Shape of one rank's heads.
  static ContextGrid local_heads(ContextGrid grid) {
    grid.shape.heads /= grid.world;
    grid.shape.kv_heads /= grid.world;
    return grid;
  }

  ContextGrid local;
  ChunkMessage queries, results, gradient_queries;
  KeyMessage keys;
  ChunkMessage query_sums, key_sums;
  size_t query_area, key_area, key_gradient_area;
  size_t decoded;  ///< of one rank's keys
  size_t query_sum_area, key_sum_area;
  size_t sums, exchanged;  ///< exchanged: of shared memory, and of scratch
};

class HeadsForm final : public ContextForm {
 public:
  HeadsForm(Communicator& comm, const ContextGrid& grid, const RopeTable* rope)
      : grid_(grid),
        layout_(grid),
        copies_(grid, rope),
        kernel_(layout_.local.block_shape()),
        world_(size_t(grid.world)),
        arrived_(world_),
        sums_(layout_.sums),
        decoded_(world_ * layout_.decoded),
        exchange_(comm, layout_.exchanged, layout_.exchanged, 4 * grid.world) {}

  static std::string refusal(const ContextGrid& grid) {
    if (grid.shape.kv_heads % grid.world == 0) return {};
    return fmt::format("kv_heads {}: expected a multiple of the {} ranks", grid.shape.kv_heads,
                       grid.world);
  }

  void forward(const ContextForward& call) override {
    exchange_.begin();
    const ContextRows rows = grid_.queries(grid_.rank);
    const auto pack = [&](int target) {
      const cpu::ChunkRows q = layout_.queries.field(outgoing(kQueries, target), rows, 0);
      copies_.rotate_in(call.q, rows, target * layout_.local.q_columns(), call.mask, q);
    };
    send_rows(layout_.queries, pack, call.k, call.v, call.mask);
    for (int step = 0; step < grid_.world; ++step) {
      const int source = rs_owner(grid_.rank, grid_.world, step);
      const ContextRows of = grid_.queries(source);
      const cpu::ChunkRows out = layout_.query_sums.field(query_sums(source), of, 0),
                           log_sums = layout_.query_sums.field(query_sums(source), of, 1);
      fill(out, 0);
      fill(log_sums, -std::numeric_limits<float>::infinity());
      for (int k = 0; k < grid_.world; ++k) {
        const int owner = ag_source(source, grid_.world, k);
        const ContextBlock block = grid_.block(source, owner, call.mask.window);
        if (block.empty()) continue;
        await_rows(source);
        await_rows(owner);
        const bool is_local = owner == source;
        const auto sum = [&](int index) {
          return layout_.query_sums.field(is_local ? query_sums(source) : partial(), of, index);
        };
        if (!is_local) {
          fill(sum(0), 0);
          fill(sum(1), -std::numeric_limits<float>::infinity());
        }
        const cpu::ChunkRows q = layout_.queries.field(incoming(kQueries, source), of, 0);
        each_slice(
            layout_.local, attention(owner, block, call.mask, q), is_local,
            [&](const cpu::AttentionBlock& slice) { kernel_.forward(slice, sum(0), sum(1)); });
        if (!is_local) merge(sum(0), sum(1), out, log_sums);
      }
      std::byte* const message = outgoing(kQueryResults, source);
      copy(log_sums, layout_.results.field(message, of, 0));
      copy(out, layout_.results.field(message, of, 1));
      if (source != grid_.rank) send(kQueryResults, source, layout_.results, of);
    }
    await_all_rows();
    each_result(kQueryResults, [&](int source, std::byte* message) {
      copies_.log_sums_out(layout_.results.field(message, rows, 0), rows,
                           source * layout_.local.shape.heads, call.log_sums);
      copies_.copy_out(layout_.results.field(message, rows, 1), rows,
                       source * layout_.local.q_columns(), call.out);
    });
  }

  void backward(const ContextBackward& call) override {
    exchange_.begin();
    const ContextRows rows = grid_.queries(grid_.rank);
    const auto pack = [&](int target) {
      const int64_t head = target * layout_.local.shape.heads,
                    column = target * layout_.local.q_columns();
      const auto field = [&](int index) {
        return layout_.gradient_queries.field(outgoing(kQueries, target), rows, index);
      };
      copies_.log_sums_in(call.log_sums, rows, head, field(0));
      copies_.deltas(call.dout, call.out, rows, head, field(1));
      copies_.rotate_in(call.q, rows, column, call.mask, field(2));
      copies_.copy_in(call.dout, rows, column, field(3));
    };
    send_rows(layout_.gradient_queries, pack, call.k, call.v, call.mask);
    for (int of = 0; of < grid_.world; ++of) {
      for (const int i : {0, 2}) {
        fill(layout_.query_sums.field(query_sums(of), grid_.queries(of), i), 0);
      }
      for (const int i : {0, 1, 2, 3}) {
        fill(layout_.key_sums.field(key_sums(of), grid_.keys(of), i), 0);
      }
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
    layout_.keys.decoded(incoming(kKeys, source), grid_.keys(source), decoded(source));
    arrived_[size_t(source)] = true;
  }
  void await_all_rows() {
    for (int source = 0; source < grid_.world; ++source) await_rows(source);
  }

  /// Byte offset of an area's message of, or for, `rank`, in shared memory and in scratch.
  size_t offset(Area area, int rank) const {
    const std::array<size_t, 4> bytes{layout_.query_area, layout_.key_area, layout_.query_area,
                                      layout_.key_gradient_area};
    size_t before = 0;
    for (size_t i = 0; i < area; ++i) before += bytes[i];
    return world_ * before + size_t(rank) * bytes[area];
  }
  std::byte* outgoing(Area area, int target) const {
    return exchange_.scratch() + offset(area, target);
  }
  std::byte* incoming(Area area, int source) const {
    return source == grid_.rank ? outgoing(area, source)
                                : exchange_.shared() + offset(area, source);
  }
  std::byte* decoded(int owner) const { return decoded_.data() + size_t(owner) * layout_.decoded; }
  /// Keys and values of `owner`, once they are here.
  std::byte* keys_of(int owner) const {
    return layout_.keys.is_encoded ? decoded(owner) : incoming(kKeys, owner);
  }
  std::byte* query_sums(int of) const { return sums_.data() + size_t(of) * layout_.query_sum_area; }
  /// Partial result of a block: sums of queries as those of a rank.
  std::byte* partial() const { return query_sums(grid_.world); }
  std::byte* key_sums(int of) const {
    return sums_.data() + (world_ + 1) * layout_.query_sum_area + size_t(of) * layout_.key_sum_area;
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
      const int64_t column = target * layout_.local.kv_columns();
      std::byte* const rows = layout_.keys.is_encoded ? decoded(target) : outgoing(kKeys, target);
      copies_.rotate_in(k, keys, column, mask, layout_.keys.rows.field(rows, keys, 0));
      copies_.copy_in(v, keys, column, layout_.keys.rows.field(rows, keys, 1));
      layout_.keys.encode(rows, keys, outgoing(kKeys, target));
      if (target == grid_.rank) continue;
      send(kQueries, target, queries, grid_.queries(grid_.rank));
      send(kKeys, target, layout_.keys.sent, keys);
    }
  }

  cpu::AttentionBlock attention(int owner, const ContextBlock& block, const AttentionMask& mask,
                                const cpu::ChunkRows& q) const {
    const ContextRows keys = grid_.keys(owner);
    const ChunkMessage& message = layout_.keys.rows;
    return grid_.attention(block, mask, q, message.field(keys_of(owner), keys, 0),
                           message.field(keys_of(owner), keys, 1));
  }

  void backward_block(int source, int owner, const ContextBlock& block, const AttentionMask& mask) {
    const ContextRows rows = grid_.queries(source), keys = grid_.keys(owner);
    const auto field = [&](int index) {
      return layout_.gradient_queries.field(incoming(kQueries, source), rows, index);
    };
    const bool is_local = owner == source;
    const cpu::ChunkRows dq = is_local ? layout_.query_sums.field(query_sums(source), rows, 2)
                                       : layout_.query_sums.field(partial(), rows, 0);
    if (!is_local) fill(dq, 0);
    const int first = is_local ? 2 : 0;
    each_slice(layout_.local, attention(owner, block, mask, field(2)), is_local,
               [&](const cpu::AttentionBlock& slice) {
                 kernel_.backward(slice,
                                  {field(3), field(0), field(1), dq,
                                   layout_.key_sums.field(key_sums(owner), keys, first),
                                   layout_.key_sums.field(key_sums(owner), keys, first + 1)});
               });
    if (!is_local) add(dq, layout_.query_sums.field(query_sums(source), rows, 0));
  }

  void return_gradients(const ContextBackward& call) {
    const ContextRows rows = grid_.queries(grid_.rank), local_keys = grid_.keys(grid_.rank);
    for (int step = 1; step <= grid_.world; ++step) {
      const int target = (grid_.rank + step) % grid_.world;
      const ContextRows queries = grid_.queries(target), keys = grid_.keys(target);
      const cpu::ChunkRows dq = layout_.query_sums.field(query_sums(target), queries, 0),
                           dk = layout_.key_sums.field(key_sums(target), keys, 2),
                           dv = layout_.key_sums.field(key_sums(target), keys, 3);
      add(layout_.query_sums.field(query_sums(target), queries, 2), dq);
      add(layout_.key_sums.field(key_sums(target), keys, 0), dk);
      add(layout_.key_sums.field(key_sums(target), keys, 1), dv);
      copies_.rotate_back(dq, queries, call.mask);
      copies_.rotate_back(dk, keys, call.mask);
      copy(dq, layout_.queries.field(outgoing(kQueryResults, target), queries, 0));
      copy(dk, layout_.keys.rows.field(outgoing(kKeyResults, target), keys, 0));
      copy(dv, layout_.keys.rows.field(outgoing(kKeyResults, target), keys, 1));
      if (target == grid_.rank) continue;
      send(kQueryResults, target, layout_.queries, queries);
      send(kKeyResults, target, layout_.keys.rows, keys);
    }
    each_result(kQueryResults, [&](int source, std::byte* message) {
      copies_.copy_out(layout_.queries.field(message, rows, 0), rows,
                       source * layout_.local.q_columns(), call.dq);
    });
    each_result(kKeyResults, [&](int source, std::byte* message) {
      const int64_t column = source * layout_.local.kv_columns();
      copies_.copy_out(layout_.keys.rows.field(message, local_keys, 0), local_keys, column,
                       call.dk);
      copies_.copy_out(layout_.keys.rows.field(message, local_keys, 1), local_keys, column,
                       call.dv);
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

  ContextGrid grid_;
  HeadsLayout layout_;
  ContextRowCopies copies_;
  cpu::BlockAttention kernel_;
  size_t world_;
  std::vector<bool> arrived_;
  Memory sums_, decoded_;
  ContextExchange exchange_;
};

}  // namespace

constinit const ContextFormRow kHeadsForm{
    "heads",
    Strategy::overlapped,
    HeadsForm::refusal,
    HeadsLayout::bytes,
    HeadsLayout::sent_bytes,
    [](Communicator& comm, const ContextGrid& grid, const RopeTable* rope)
        -> std::unique_ptr<ContextForm> { return std::make_unique<HeadsForm>(comm, grid, rope); }};

}  // namespace tandem
