// Forms in which keys and values travel and queries stay. `gather` waits for all keys, then
// computes; `ring` computes local keys first and each other chunk when it has arrived. In the
// backward pass keys and values travel again, and the gradients that their rank's queries do not
// give return to it as partial sums, under the local head, which `ring` computes last.
#include <limits>

#include "overlap/attention/exchange.h"

namespace tandem {

using schedule::ag_source;
using schedule::ag_target;
using schedule::ContextBlock;
using schedule::ContextRows;

namespace {

/// Messages of the passes, and bytes that the form allocates for them.
struct KeysLayout {
  explicit KeysLayout(const ContextGrid& grid)
      : keys(grid.keys_and_values()),
        gradients(
            grid.key_message({{DType::f32, grid.kv_columns()}, {DType::f32, grid.kv_columns()}})),
        queries(grid.query_message({{DType::f32, grid.q_columns()},           // out, or dq
                                    {DType::f32, grid.shape.heads},           // log_sums
                                    {DType::f32, grid.q_columns()},           // partial out, or dq
                                    {DType::f32, grid.shape.heads},           // its log_sums
                                    {DType::f32, grid.q_columns()},           // dq of local keys
                                    {DType::f32, grid.shape.heads},           // delta
                                    {grid.shape.dtype, grid.q_columns()},     // q
                                    {grid.shape.dtype, grid.q_columns()}})),  // dout
        key_area(keys.sent.capacity(grid.max_key_chunk())),
        gradient_area(gradients.capacity(grid.max_key_chunk())),
        shared(size_t(grid.world) * (key_area + gradient_area)),
        scratch(key_area + size_t(grid.world + 1) * gradient_area),
        decoded(keys.decoded_bytes(grid.max_key_chunk())) {}
  static size_t bytes(const ContextGrid& grid) {
    const KeysLayout layout(grid);
    return ContextExchange::bytes(layout.shared, layout.scratch) + 2 * layout.decoded +
           layout.queries.capacity(grid.max_query_chunk()) +
           cpu::BlockAttention::bytes(grid.block_shape());
  }
  /// k and v to each rank whose queries read them; backward: also dk and dv, in f32, to each rank
  /// whose keys are read.
  static int64_t sent_bytes(ContextPass pass, const ContextGrid& grid, int64_t window) {
    const KeysLayout layout(grid);
    int64_t bytes = 0;
    for (int other = 0; other < grid.world; ++other) {
      if (other == grid.rank) continue;
      bytes += int64_t(layout.keys.sent.bytes(grid.block(other, grid.rank, window).keys));
      if (pass == ContextPass::forward) continue;
      bytes += int64_t(layout.gradients.bytes(grid.block(grid.rank, other, window).keys));
    }
    return bytes;
  }

  KeyMessage keys;
  ChunkMessage gradients, queries;
  size_t key_area, gradient_area, shared, scratch;
  size_t decoded;  ///< of the local keys and values, and of those that a block reads
};

class KeysForm final : public ContextForm {
 public:
  KeysForm(Communicator& comm, const ContextGrid& grid, const RopeTable* rope, Strategy strategy)
      : grid_(grid),
        overlaps_(strategy == Strategy::overlapped),
        copies_(grid, rope),
        kernel_(grid.block_shape()),
        layout_(grid),
        queries_(layout_.queries, grid.max_query_chunk()),
        decoded_(2 * layout_.decoded),
        exchange_(comm, layout_.shared, layout_.scratch, 2 * grid.world) {}

  void forward(const ContextForward& call) override {
    begin(call.q, call.k, call.v, call.mask);
    const ContextRows rows = grid_.queries(grid_.rank);
    clear(kSums, kLogSums);
    if (!overlaps_) await_all();
    each_slice(grid_, local_block(call.mask), true, [&](const cpu::AttentionBlock& slice) {
      kernel_.forward(slice, field(kSums), field(kLogSums));
    });
    each_remote(call.mask, [&](int owner, const cpu::AttentionBlock& block) {
      clear(kPartial, kPartialLogSums);
      each_slice(grid_, block, false, [&](const cpu::AttentionBlock& slice) {
        await_keys(owner, slice.rows);
        kernel_.forward(slice, field(kPartial), field(kPartialLogSums));
      });
      merge(field(kPartial), field(kPartialLogSums), field(kSums), field(kLogSums));
    });
    await_all();
    copies_.copy_out(field(kSums), rows, 0, call.out);
    copies_.log_sums_out(field(kLogSums), rows, 0, call.log_sums);
  }

  void backward(const ContextBackward& call) override {
    begin(call.q, call.k, call.v, call.mask);
    const ContextRows rows = grid_.queries(grid_.rank), local = grid_.keys(grid_.rank);
    copies_.copy_in(call.dout, rows, 0, field(kDout));
    copies_.log_sums_in(call.log_sums, rows, 0, field(kLogSums));
    copies_.deltas(call.dout, call.out, rows, 0, field(kDelta));
    for (const Field f : {kSums, kLocal}) fill(field(f), 0);
    for (const int i : {0, 1}) {
      for (const int sums : {grid_.rank, grid_.world}) {
        fill(layout_.gradients.field(partial(sums), local, i), 0);
      }
    }
    if (!overlaps_) await_all();
    const cpu::AttentionBlock block = local_block(call.mask);
    const bool has_tail = local.tail.count > 0;
    backward_local(block, has_tail);
    each_remote(call.mask, [&](int owner, const cpu::AttentionBlock& remote) {
      const ContextRows& keys = remote.rows.keys;
      const cpu::ChunkRows dk = layout_.gradients.field(partial(owner), keys, 0),
                           dv = layout_.gradients.field(partial(owner), keys, 1);
      fill(field(kPartial), 0), fill(dk, 0), fill(dv, 0);
      each_slice(grid_, remote, false, [&](const cpu::AttentionBlock& slice) {
        await_keys(owner, slice.rows);
        kernel_.backward(slice, gradients(kPartial, dk, dv));
        if (overlaps_ && slice.rows.keys.head.count > 0) send_head_gradients(owner, keys);
      });
      if (overlaps_) send_tail_gradients(owner, keys);
      add(field(kPartial), field(kSums));
    });
    if (has_tail) backward_local(block, false);
    for (int step = 1; step < grid_.world; ++step) {
      const int owner = ag_source(grid_.rank, grid_.world, step);
      const ContextRows keys = grid_.block(grid_.rank, owner, call.mask.window).keys;
      if (overlaps_ && keys.count() > 0) continue;  // sent
      send_head_gradients(owner, keys);
      send_tail_gradients(owner, keys);
    }
    await_all();
    add(field(kLocal), field(kSums));
    copies_.rotate_out(field(kSums), rows, 0, call.mask, call.dq);
    sum_gradients(call.mask);
    copies_.rotate_out(layout_.gradients.field(partial(grid_.rank), local, 0), local, 0, call.mask,
                       call.dk);
    copies_.copy_out(layout_.gradients.field(partial(grid_.rank), local, 1), local, 0, call.dv);
  }

 private:
  enum Field : uint8_t {
    kSums,
    kLogSums,
    kPartial,
    kPartialLogSums,
    kLocal,
    kDelta,
    kQueries,
    kDout
  };
  cpu::ChunkRows field(Field index) const {
    return queries_.field(grid_.queries(grid_.rank), index);
  }
  std::byte* local_keys() const {
    return layout_.keys.is_encoded ? decoded_.data() : exchange_.scratch();
  }
  /// Key gradients that this rank computes for `owner`; `world`: sum of those for this rank.
  std::byte* partial(int owner) const {
    return exchange_.scratch() + layout_.key_area + size_t(owner) * layout_.gradient_area;
  }
  size_t keys_at(int owner) const { return size_t(owner) * layout_.key_area; }
  size_t gradients_at(int source) const {
    return size_t(grid_.world) * layout_.key_area + size_t(source) * layout_.gradient_area;
  }

  /// Starts a pass: sends the local keys and values.
  void begin(const Tensor& q, const Tensor& k, const Tensor& v, const AttentionMask& mask) {
    exchange_.begin();
    const ContextRows local = grid_.keys(grid_.rank);
    copies_.rotate_in(k, local, 0, mask, layout_.keys.rows.field(local_keys(), local, 0));
    copies_.copy_in(v, local, 0, layout_.keys.rows.field(local_keys(), local, 1));
    layout_.keys.encode(local_keys(), local, exchange_.scratch());
    for (int step = 1; step < grid_.world; ++step) {
      const int target = ag_target(grid_.rank, grid_.world, step);
      exchange_.send(target, layout_.keys.sent, grid_.block(target, grid_.rank, mask.window).keys,
                     exchange_.scratch(), keys_at(grid_.rank), grid_.rank);
    }
    copies_.rotate_in(q, grid_.queries(grid_.rank), 0, mask, field(kQueries));
  }

  void clear(Field results, Field log_sums) const {
    fill(field(results), 0);
    fill(field(log_sums), -std::numeric_limits<float>::infinity());
  }

  /// Block of the local queries and the keys of `owner`, whose rows are at `base`.
  cpu::AttentionBlock make_block(int owner, const AttentionMask& mask, std::byte* base,
                                 const ContextRows& rows) const {
    const ChunkMessage& keys = layout_.keys.rows;
    return grid_.attention(grid_.block(grid_.rank, owner, mask.window), mask, field(kQueries),
                           keys.field(base, rows, 0), keys.field(base, rows, 1));
  }
  cpu::AttentionBlock local_block(const AttentionMask& mask) const {
    return make_block(grid_.rank, mask, local_keys(), grid_.keys(grid_.rank));
  }

  /// Calls body(owner of the keys, block) for the blocks of the local queries and other ranks'
  /// keys, which may have to arrive.
  template <typename Body>
  void each_remote(const AttentionMask& mask, const Body& body) {
    for (int step = 1; step < grid_.world; ++step) {
      const int owner = ag_source(grid_.rank, grid_.world, step);
      const ContextRows keys = grid_.block(grid_.rank, owner, mask.window).keys;
      if (keys.count() == 0) continue;
      std::byte* const base = layout_.keys.is_encoded ? decoded_.data() + layout_.decoded
                                                      : exchange_.shared() + keys_at(owner);
      body(owner, make_block(owner, mask, base, keys));
    }
  }

  /// Returns once the keys of a slice of a block are here.
  void await_keys(int owner, const ContextBlock& slice) {
    if (slice.keys.head.count > 0) {
      exchange_.await_head(owner, owner);
    } else {
      exchange_.await(owner, owner);
    }
    layout_.keys.decoded(exchange_.shared() + keys_at(owner), slice.keys,
                         decoded_.data() + layout_.decoded);
  }
  void await_all() {
    for (int step = 1; step < grid_.world; ++step) {
      const int owner = ag_source(grid_.rank, grid_.world, step);
      exchange_.await(owner, owner);
    }
  }

  cpu::BlockAttention::Gradients gradients(Field dq, const cpu::ChunkRows& dk,
                                           const cpu::ChunkRows& dv) const {
    return {field(kDout), field(kLogSums), field(kDelta), field(dq), dk, dv};
  }
  /// Backward pass of the local queries and one chunk of the local keys.
  void backward_local(const cpu::AttentionBlock& block, bool tail) {
    cpu::AttentionBlock slice = block;
    slice.rows = grid_.slice(block.rows, tail, block.mask.window);
    if (slice.rows.empty()) return;
    const ContextRows local = grid_.keys(grid_.rank);
    kernel_.backward(slice,
                     gradients(kLocal, layout_.gradients.field(partial(grid_.rank), local, 0),
                               layout_.gradients.field(partial(grid_.rank), local, 1)));
  }

  void send_head_gradients(int owner, const ContextRows& keys) {
    exchange_.send_head(owner, layout_.gradients, keys, partial(owner), gradients_at(grid_.rank),
                        grid_.world + grid_.rank);
  }
  void send_tail_gradients(int owner, const ContextRows& keys) {
    exchange_.send_tail(owner, layout_.gradients, keys, partial(owner), gradients_at(grid_.rank),
                        grid_.world + grid_.rank);
  }

  /// Adds the sum of other ranks' to the local ones.
  void sum_gradients(const AttentionMask& mask) {
    const ContextRows local = grid_.keys(grid_.rank);
    for (int step = 1; step < grid_.world; ++step) {
      const int source = ag_target(grid_.rank, grid_.world, step);
      exchange_.await(grid_.world + source, source);
      const ContextRows rows = grid_.block(source, grid_.rank, mask.window).keys;
      for (const int i : {0, 1}) {
        add(layout_.gradients.field(exchange_.shared() + gradients_at(source), rows, i),
            layout_.gradients.field(partial(grid_.world), local, i));
      }
    }
    for (const int i : {0, 1}) {
      add(layout_.gradients.field(partial(grid_.world), local, i),
          layout_.gradients.field(partial(grid_.rank), local, i));
    }
  }

  ContextGrid grid_;
  bool overlaps_;
  ContextRowCopies copies_;
  cpu::BlockAttention kernel_;
  KeysLayout layout_;
  ContextScratch queries_;
  Memory decoded_;
  ContextExchange exchange_;
};

template <Strategy kStrategy>
std::unique_ptr<ContextForm> make_keys_form(Communicator& comm, const ContextGrid& grid,
                                            const RopeTable* rope) {
  return std::make_unique<KeysForm>(comm, grid, rope, kStrategy);
}

std::string never(const ContextGrid&) {
  return {};
}

}  // namespace

constinit const ContextFormRow kGatherForm{
    "gather",          Strategy::serial,       never,
    KeysLayout::bytes, KeysLayout::sent_bytes, make_keys_form<Strategy::serial>};
constinit const ContextFormRow kRingForm{"ring",
                                         Strategy::overlapped,
                                         never,
                                         KeysLayout::bytes,
                                         KeysLayout::sent_bytes,
                                         make_keys_form<Strategy::overlapped>};

}  // namespace tandem
