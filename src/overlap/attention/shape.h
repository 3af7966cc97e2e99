// Shape of context-parallel attention, operands of its passes, and the rows of every rank.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/cpu/block_attention.h"
#include "overlap/attention/messages.h"
#include "schedule/context.h"
#include "tandem/codec.h"
#include "tandem/dtype.h"

namespace tandem {

struct ContextShape {
  int64_t batch = 1;     ///< sequences; a rank has rows of each
  int64_t seq = 0;       ///< positions of queries over all ranks, at least 1
  int64_t keys = 0;      ///< positions of keys over all ranks; 0: seq
  int64_t heads = 1;     ///< of queries; a multiple of kv_heads
  int64_t kv_heads = 1;  ///< of keys and values
  int64_t head_dim = 0;
  double softcap = 0;        ///< as AttentionShape::softcap; CPU ranks only
  DType dtype = DType::f32;  ///< of all rows: f32 or bf16
  bool causal = true;        ///< needs keys == seq; false: every query reads every key
  schedule::ContextSplit split = schedule::ContextSplit::balanced;
  /// Wire format of keys and values, which every query then reads rounded, in both passes, whatever
  /// travels. Gradients travel uncompressed, and are those of the rounded keys and values.
  Wire wire = {};
};

/// Expected wire format of keys and values of heads of `head_dim`; empty if `wire` is one. Groups
/// lie within a head, so that they are the same in every form's messages.
inline std::string find_wire_conflict(const Wire& wire, int64_t head_dim) {
  if (wire.is_none()) return {};
  if (wire.is_exact()) return "a format with groups, whose bytes are known";
  if (head_dim % wire.group == 0) return {};
  return fmt::format("groups that divide head_dim {}, not {} elements", head_dim, wire.group);
}

/// Operands of one rank. Row b * rows + i of q, out, dout and dq is row i of sequence b, whose
/// position is schedule::context_rows(seq, ranks, rank, split).position(i); k, v, dk and dv have
/// the rows of `keys` positions likewise. Rows may be strided. log_sums: f32 [batch * heads, rows].
struct ContextForward {
  const Tensor &q, &k, &v, &out, &log_sums;
  const AttentionMask& mask;
};
struct ContextBackward {
  const Tensor &q, &k, &v, &out, &log_sums, &dout, &dq, &dk, &dv;
  const AttentionMask& mask;
};

/// Rows and blocks of all ranks.
struct ContextGrid {
  ContextShape shape;
  int world = 1, rank = 0;

  schedule::ContextRows queries(int of) const {
    return schedule::context_rows(shape.seq, world, of, shape.split);
  }
  schedule::ContextRows keys(int of) const {
    return schedule::context_rows(shape.keys, world, of, shape.split);
  }
  schedule::ContextMask mask(int64_t window) const { return {shape.causal, window}; }
  schedule::ContextBlock block(int query_rank, int key_rank, int64_t window) const {
    return schedule::context_block(queries(query_rank), keys(key_rank), mask(window));
  }
  /// Slice of a block with the keys of one chunk, which is computed at a time.
  schedule::ContextBlock slice(const schedule::ContextBlock& block, bool tail,
                               int64_t window) const {
    return schedule::context_block_slice(block, tail, mask(window));
  }
  int64_t q_columns() const { return shape.heads * shape.head_dim; }
  int64_t kv_columns() const { return shape.kv_heads * shape.head_dim; }
  /// Max positions of a chunk: those of rank 0's head.
  int64_t max_query_chunk() const { return queries(0).head.count; }
  int64_t max_key_chunk() const { return keys(0).head.count; }
  ChunkMessage query_message(std::vector<ChunkMessage::Field> fields) const {
    return {shape.batch, max_query_chunk(), std::move(fields)};
  }
  ChunkMessage key_message(std::vector<ChunkMessage::Field> fields) const {
    return {shape.batch, max_key_chunk(), std::move(fields)};
  }
  KeyMessage keys_and_values() const {
    const std::vector<ChunkMessage::Field> fields(2, {shape.dtype, kv_columns()});
    return {key_message(fields), ChunkMessage(shape.batch, max_key_chunk(), fields, shape.wire),
            !shape.wire.is_none()};
  }
  cpu::BlockShape block_shape() const {
    return {shape.batch,    shape.heads,         shape.kv_heads,
            shape.head_dim, 2 * max_key_chunk(), shape.softcap};
  }
  /// Block of queries and keys that are those of a message's rows, with its tensors.
  cpu::AttentionBlock attention(const schedule::ContextBlock& rows, const AttentionMask& masked,
                                const cpu::ChunkRows& q, const cpu::ChunkRows& k,
                                const cpu::ChunkRows& v) const {
    const bool has_documents = masked.document_starts.dims() > 0;
    return {rows,
            mask(masked.window),
            has_documents ? masked.document_starts.as<int32_t>() : nullptr,
            shape.seq,
            q,
            k,
            v};
  }
};

}  // namespace tandem
