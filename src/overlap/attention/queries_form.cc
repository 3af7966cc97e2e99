// Form in which queries travel and keys and values stay (LV-XAttn, arXiv 2502.02406): each rank
// computes other ranks' queries over its keys and returns the partial results, in f32 with their
// log-sums, straight to the queries' rank, which merges them. In the backward pass gradients of
// keys never travel. A wire format of keys saves no bytes here; they are rounded to it, so that the
// result is that of the other forms.
#include <limits>

#include "overlap/attention/exchange.h"

namespace tandem {

using schedule::ag_source;
using schedule::ag_target;
using schedule::ContextBlock;
using schedule::ContextRows;

namespace {

/// Messages of the passes, and bytes that the form allocates for them.
struct QueriesLayout {
  explicit QueriesLayout(const ContextGrid& grid)
      : queries(grid.query_message({{grid.shape.dtype, grid.q_columns()}})),
        results(
            grid.query_message({{DType::f32, grid.q_columns()}, {DType::f32, grid.shape.heads}})),
        gradient_queries(grid.query_message({{DType::f32, grid.shape.heads},  // log_sums
                                             {DType::f32, grid.shape.heads},  // delta
                                             {grid.shape.dtype, grid.q_columns()},
                                             {grid.shape.dtype, grid.q_columns()}})),
        gradients(grid.query_message({{DType::f32, grid.q_columns()}})),
        keys(grid.keys_and_values()),
        key_gradients(
            grid.key_message({{DType::f32, grid.kv_columns()}, {DType::f32, grid.kv_columns()}})),
        encoded(keys.is_encoded ? keys.sent.capacity(grid.max_key_chunk()) : 0),
        query_area(gradient_queries.capacity(grid.max_query_chunk())),
        result_area(results.capacity(grid.max_query_chunk())),
        shared(size_t(grid.world) * (query_area + result_area)),
        scratch(query_area + size_t(grid.world) * result_area) {}
  static size_t bytes(const ContextGrid& grid) {
    const QueriesLayout layout(grid);
    return ContextExchange::bytes(layout.shared, layout.scratch) +
           layout.keys.rows.capacity(grid.max_key_chunk()) + layout.encoded +
           layout.key_gradients.capacity(grid.max_key_chunk()) +
           cpu::BlockAttention::bytes(grid.block_shape());
  }
  /// q to each rank whose keys are read, and for its queries' rank a partial result with log-sums
  /// in f32; backward: q, dout, log-sums and deltas, and dq in f32.
  static int64_t sent_bytes(ContextPass pass, const ContextGrid& grid, int64_t window) {
    const int64_t q = grid.q_columns(), heads = grid.shape.heads, f32 = sizeof(float);
    const int64_t q_bytes = q * int64_t(size_of(grid.shape.dtype));
    const bool is_forward = pass == ContextPass::forward;
    int64_t bytes = 0;
    for (int other = 0; other < grid.world; ++other) {
      if (other == grid.rank) continue;
      bytes += grid.block(grid.rank, other, window).queries.count() *
               (is_forward ? q_bytes : 2 * q_bytes + 2 * f32 * heads);
      bytes +=
          grid.block(other, grid.rank, window).queries.count() * f32 * (is_forward ? q + heads : q);
    }
    return grid.shape.batch * bytes;
  }

  ChunkMessage queries, results, gradient_queries, gradients;
  KeyMessage keys;
  ChunkMessage key_gradients;
  size_t encoded, query_area, result_area, shared, scratch;
};

class QueriesForm final : public ContextForm {
 public:
  QueriesForm(Communicator& comm, const ContextGrid& grid, const RopeTable* rope)
      : grid_(grid),
        copies_(grid, rope),
        kernel_(grid.block_shape()),
        layout_(grid),
        keys_(layout_.keys.rows, grid.max_key_chunk()),
        key_gradients_(layout_.key_gradients, grid.max_key_chunk()),
        encoded_(layout_.encoded),
        exchange_(comm, layout_.shared, layout_.scratch, 2 * grid.world) {}

  void forward(const ContextForward& call) override {
    const ContextRows rows = grid_.queries(grid_.rank);
    exchange_.begin();
    copies_.rotate_in(call.q, rows, 0, call.mask,
                      layout_.queries.field(exchange_.scratch(), rows, 0));
    send_queries(layout_.queries, call.mask);
    load_keys(call.k, call.v, call.mask);
    const auto compute = [&](int source, const ContextBlock& block, const ContextRows& in_message) {
      const cpu::ChunkRows out = layout_.results.field(result(source), in_message, 0),
                           log_sums = layout_.results.field(result(source), in_message, 1);
      fill(out, 0);
      fill(log_sums, -std::numeric_limits<float>::infinity());
      if (block.empty()) return;
      const cpu::ChunkRows q = layout_.queries.field(queries_of(source), in_message, 0);
      kernel_.forward(attention(block, call.mask, q), out, log_sums);
    };
    each_block(layout_.results, call.mask, compute);
    const cpu::ChunkRows out = layout_.results.field(result(grid_.rank), rows, 0),
                         log_sums = layout_.results.field(result(grid_.rank), rows, 1);
    each_result(call.mask, [&](std::byte* base, const ContextRows& field) {
      merge(layout_.results.field(base, field, 0), layout_.results.field(base, field, 1), out,
            log_sums);
    });
    copies_.copy_out(out, rows, 0, call.out);
    copies_.log_sums_out(log_sums, rows, 0, call.log_sums);
  }

  void backward(const ContextBackward& call) override {
    const ContextRows rows = grid_.queries(grid_.rank), keys = grid_.keys(grid_.rank);
    exchange_.begin();
    const auto local = [&](int index) {
      return layout_.gradient_queries.field(exchange_.scratch(), rows, index);
    };
    copies_.log_sums_in(call.log_sums, rows, 0, local(0));
    copies_.deltas(call.dout, call.out, rows, 0, local(1));
    copies_.rotate_in(call.q, rows, 0, call.mask, local(2));
    copies_.copy_in(call.dout, rows, 0, local(3));
    send_queries(layout_.gradient_queries, call.mask);
    load_keys(call.k, call.v, call.mask);
    const cpu::ChunkRows dk = key_gradients_.field(keys, 0), dv = key_gradients_.field(keys, 1);
    fill(dk, 0), fill(dv, 0);
    const auto compute = [&](int source, const ContextBlock& block, const ContextRows& in_message) {
      const cpu::ChunkRows dq = layout_.gradients.field(result(source), in_message, 0);
      fill(dq, 0);
      if (block.empty()) return;
      const auto field = [&](int index) {
        return layout_.gradient_queries.field(queries_of(source), in_message, index);
      };
      kernel_.backward(attention(block, call.mask, field(2)),
                       {field(3), field(0), field(1), dq, dk, dv});
    };
    each_block(layout_.gradients, call.mask, compute);
    copies_.rotate_out(dk, keys, 0, call.mask, call.dk);
    copies_.copy_out(dv, keys, 0, call.dv);
    const cpu::ChunkRows dq = layout_.gradients.field(result(grid_.rank), rows, 0);
    each_result(call.mask, [&](std::byte* base, const ContextRows& field) {
      add(layout_.gradients.field(base, field, 0), dq);
    });
    copies_.rotate_out(dq, rows, 0, call.mask, call.dq);
  }

 private:
  std::byte* queries_of(int source) const {
    return source == grid_.rank ? exchange_.scratch()
                                : exchange_.shared() + size_t(source) * layout_.query_area;
  }
  /// Results that this rank computes for `source`.
  std::byte* result(int source) const {
    return exchange_.scratch() + layout_.query_area + size_t(source) * layout_.result_area;
  }
  size_t results_at(int owner) const {
    return size_t(grid_.world) * layout_.query_area + size_t(owner) * layout_.result_area;
  }

  void send_queries(const ChunkMessage& message, const AttentionMask& mask) {
    for (int step = 1; step < grid_.world; ++step) {
      const int owner = ag_source(grid_.rank, grid_.world, step);
      exchange_.send(owner, message, grid_.block(grid_.rank, owner, mask.window).queries,
                     exchange_.scratch(), size_t(grid_.rank) * layout_.query_area, grid_.rank);
    }
  }

  void load_keys(const Tensor& k, const Tensor& v, const AttentionMask& mask) {
    const ContextRows rows = grid_.keys(grid_.rank);
    copies_.rotate_in(k, rows, 0, mask, keys_.field(rows, 0));
    copies_.copy_in(v, rows, 0, keys_.field(rows, 1));
    layout_.keys.encode(keys_.memory.data(), rows, encoded_.data());
  }

  cpu::AttentionBlock attention(const ContextBlock& block, const AttentionMask& mask,
                                const cpu::ChunkRows& q) const {
    const ContextRows rows = grid_.keys(grid_.rank);
    return grid_.attention(block, mask, q, keys_.field(rows, 0), keys_.field(rows, 1));
  }

  /// Computes the local queries, then those of each other rank when they have arrived, and returns
  /// their results in `message`. compute(source, block, rows of its messages).
  template <typename Compute>
  void each_block(const ChunkMessage& message, const AttentionMask& mask, const Compute& compute) {
    for (int step = 0; step < grid_.world; ++step) {
      const int source = ag_target(grid_.rank, grid_.world, step);
      const ContextBlock block = grid_.block(source, grid_.rank, mask.window);
      if (source == grid_.rank) {
        compute(source, block, grid_.queries(source));
        continue;
      }
      if (!block.empty()) {
        exchange_.await(source, source);
        compute(source, block, block.queries);
      }
      exchange_.send(source, message, block.queries, result(source), results_at(grid_.rank),
                     grid_.world + grid_.rank);
    }
  }

  /// Calls add(message, its rows) for the other ranks' results of the local queries.
  template <typename Add>
  void each_result(const AttentionMask& mask, const Add& add_result) {
    for (int step = 1; step < grid_.world; ++step) {
      const int owner = ag_source(grid_.rank, grid_.world, step);
      exchange_.await(grid_.world + owner, owner);
      add_result(exchange_.shared() + results_at(owner),
                 grid_.block(grid_.rank, owner, mask.window).queries);
    }
  }

  ContextGrid grid_;
  ContextRowCopies copies_;
  cpu::BlockAttention kernel_;
  QueriesLayout layout_;
  ContextScratch keys_, key_gradients_;
  Memory encoded_;
  ContextExchange exchange_;
};

}  // namespace

constinit const ContextFormRow kQueriesForm{
    "queries",
    Strategy::overlapped,
    [](const ContextGrid&) { return std::string(); },
    QueriesLayout::bytes,
    QueriesLayout::sent_bytes,
    [](Communicator& comm, const ContextGrid& grid,
       const RopeTable* rope) -> std::unique_ptr<ContextForm> {
      return std::make_unique<QueriesForm>(comm, grid, rope);
    }};

}  // namespace tandem
