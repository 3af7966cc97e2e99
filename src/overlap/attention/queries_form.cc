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
        key_gradients(grid.key_message({{DType::f32, grid.kv_columns()},  // dk, dv of others
                                        {DType::f32, grid.kv_columns()},
                                        {DType::f32, grid.kv_columns()},  // of local queries
                                        {DType::f32, grid.kv_columns()}})),
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
           layout.gradients.capacity(grid.max_query_chunk()) +
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
        sums_(layout_.gradients, grid.max_query_chunk()),
        encoded_(layout_.encoded),
        exchange_(comm, layout_.shared, layout_.scratch, 2 * grid.world) {}

  void forward(const ContextForward& call) override {
    const ContextRows rows = grid_.queries(grid_.rank);
    exchange_.begin();
    copies_.rotate_in(call.q, rows, 0, call.mask,
                      layout_.queries.field(exchange_.scratch(), rows, 0));
    send_queries(layout_.queries, call.mask);
    load_keys(call.k, call.v, call.mask);
    const auto clear = [&](int source, const ContextRows& in_message) {
      fill(layout_.results.field(result(source), in_message, 0), 0);
      fill(layout_.results.field(result(source), in_message, 1),
           -std::numeric_limits<float>::infinity());
    };
    const auto compute = [&](int source, const ContextBlock& slice, const ContextRows& in_message) {
      const cpu::ChunkRows q = layout_.queries.field(queries_of(source), in_message, 0);
      kernel_.forward(attention(slice, call.mask, q),
                      layout_.results.field(result(source), in_message, 0),
                      layout_.results.field(result(source), in_message, 1));
    };
    each_block(layout_.results, call.mask, clear, compute);
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
    const auto of_keys = [&](int index) { return key_gradients_.field(keys, index); };
    for (const int i : {0, 1, 2, 3}) fill(of_keys(i), 0);
    const auto clear = [&](int source, const ContextRows& in_message) {
      fill(layout_.gradients.field(result(source), in_message, 0), 0);
    };
    const auto compute = [&](int source, const ContextBlock& slice, const ContextRows& in_message) {
      const int sums = source == grid_.rank ? 2 : 0;
      const auto field = [&](int index) {
        return layout_.gradient_queries.field(queries_of(source), in_message, index);
      };
      kernel_.backward(
          attention(slice, call.mask, field(2)),
          {field(3), field(0), field(1), layout_.gradients.field(result(source), in_message, 0),
           of_keys(sums), of_keys(sums + 1)});
    };
    each_block(layout_.gradients, call.mask, clear, compute);
    for (const int i : {0, 1}) add(of_keys(i), of_keys(i + 2));
    copies_.rotate_out(of_keys(2), keys, 0, call.mask, call.dk);
    copies_.copy_out(of_keys(3), keys, 0, call.dv);
    const cpu::ChunkRows dq = sums_.field(rows);
    fill(dq, 0);
    each_result(call.mask, [&](std::byte* base, const ContextRows& field) {
      add(layout_.gradients.field(base, field, 0), dq);
    });
    add(layout_.gradients.field(result(grid_.rank), rows, 0), dq);
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

  /// Computes the local queries over the tail of the keys (the head if there is none), those of
  /// each other rank when they have arrived, whose results are returned in `message`, and meanwhile
  /// the local ones over the head. clear and compute are called with the source of the queries, and
  /// the rows of its messages; compute also with a slice of the block.
  template <typename Clear, typename Compute>
  void each_block(const ChunkMessage& message, const AttentionMask& mask, const Clear& clear,
                  const Compute& compute) {
    const auto compute_slice = [&](int source, bool tail, const ContextRows& in_message) {
      const ContextBlock slice =
          grid_.slice(grid_.block(source, grid_.rank, mask.window), tail, mask.window);
      if (!slice.empty()) compute(source, slice, in_message);
    };
    const ContextRows local = grid_.queries(grid_.rank);
    const bool has_tail = grid_.keys(grid_.rank).tail.count > 0;
    clear(grid_.rank, local);
    compute_slice(grid_.rank, has_tail, local);
    for (int step = 1; step < grid_.world; ++step) {
      const int source = ag_target(grid_.rank, grid_.world, step);
      const ContextRows rows = grid_.block(source, grid_.rank, mask.window).queries;
      if (rows.count() > 0) {
        exchange_.await(source, source);
        clear(source, rows);
        for (const bool tail : {false, true}) compute_slice(source, tail, rows);
      }
      exchange_.send(source, message, rows, result(source), results_at(grid_.rank),
                     grid_.world + grid_.rank);
    }
    if (has_tail) compute_slice(grid_.rank, false, local);
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
  ContextScratch keys_, key_gradients_, sums_;
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
