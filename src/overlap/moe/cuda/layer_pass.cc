// Passes of MoeOnGpus: their forms, and the launch of each step of schedule/moe_pass.h.
//
// With rows sorted concurrently with the first GEMM, all kernels of a pass are on one stream: a
// GEMM that runs concurrently with a kernel begins once all blocks of that kernel run
// (concurrent.cuh), so that it cannot keep the kernel it waits for from starting.
#include "core/cuda/check.h"
#include "overlap/moe/cuda/layer.h"
#include "overlap/moe/cuda/memory.h"
#include "overlap/moe/cuda/wire.h"

namespace tandem::gpu {

using namespace schedule;

namespace {

/// Copies `bytes` to another rank's memory, then the call's number from `number` to its signal. The
/// second copy reads the number when it runs, after the data.
void push(const void* from, std::byte* to, size_t bytes, const uint64_t* number, uint64_t* signal,
          cudaStream_t stream) {
  if (bytes > 0) check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream), "moe: push");
  check(cudaMemcpyAsync(signal, number, sizeof(uint64_t), cudaMemcpyDefault, stream),
        "moe: signal a push");
}

}  // namespace

MoePassForm MoeOnGpus::form_of(const Blocks& candidate, size_t column_groups) const {
  MoePassForm form{.sends = comm_.size() > 1,
                   .encodes_rows = !candidate.dispatch.is_none(),
                   .gathers_in_gemm = !candidate.sorts,
                   .saves_gathered = trains(),
                   .has_gate_step = trains(),
                   .column_groups = int(column_groups)};
  if (candidate.is_serial()) return form;
  if (candidate.pushes) {
    form.rows = RowExchange::pushed;
    form.sums = SumExchange::pushed;
    return form;
  }
  if (candidate.overlaps_rows()) form.rows = RowExchange::overlapped;
  if (candidate.sends_while_sorting()) form.rows = RowExchange::while_sorting;
  form.sums = candidate.overlaps_sort() ? SumExchange::local_last : SumExchange::by_columns;
  return form;
}

Event& MoeOnGpus::event_of(PassEvent event) {
  if (event == kNotified) return notified_;
  if (event == kRowsSent) return rows_sent_;
  if (event == kSumsSent) return sums_sent_;
  return computed_[size_t(event - computed_event(0))];
}

void MoeOnGpus::enqueue_pass(const MoePass& pass, PassArgs& args) {
  for (const PassStep& step : pass) {
    const cudaStream_t stream = step.lane == Lane::side ? side_ : comm_.stream();
    if (step.before != kNoEvent) event_of(step.before).block(stream);
    launch(step, args, stream);
    if (step.after != kNoEvent) event_of(step.after).record(stream);
  }
}

void MoeOnGpus::launch(const PassStep& step, PassArgs& args, cudaStream_t stream) {
  switch (step.step) {
    case MoeStep::notify:
      return launch_notify(args.call, stream);
    case MoeStep::encode_rows:
      return launch_encode_rows(args.call, blocks_[args.candidate].dispatch, args.rows.data(),
                                messages_.data(), local_decoded(), stream);
    case MoeStep::send_rows:
      return launch_rows(args, stream);
    case MoeStep::decode_rows:
      return launch_decode_rows(args.call, blocks_[args.candidate].dispatch, coords_.experts,
                                decoded_.data(), row_blocks(blocks_[args.candidate]), stream);
    case MoeStep::permute:
      return launch_permutation(args, stream);
    case MoeStep::gather:
    case MoeStep::send_and_gather:
      return launch_gathering(args, step.step == MoeStep::send_and_gather, stream);
    case MoeStep::first:
      return launch_first(args, stream);
    case MoeStep::swiglu:
      return launch_sorted_swiglu(sorted(), args.activations->saved.gate_up.data(), inner_.data(),
                                  coords_.ffn, stream);
    case MoeStep::second:
      return launch_second(step, args, stream);
    case MoeStep::send_sums:
    case MoeStep::stage_sums:
      return launch_sums(step, args, stream);
    case MoeStep::sum_ranks:
      return launch_sum(args, stream);
    case MoeStep::push_rows:
      return push_rows(args, stream);
    case MoeStep::push_sums:
      return push_sums(stream);
    case MoeStep::d_act:
    case MoeStep::gate:
    case MoeStep::dx:
    case MoeStep::dw_in:
    case MoeStep::dw_out:
      return launch_gradient(step, args, stream);
  }
}

bool MoeOnGpus::joins(const Blocks& candidate, const Tables& tables) const {
  return comm_.size() > 1 && candidate.overlaps_rows() &&
         in_of(candidate).table(tables.in).joining.any();
}

int MoeOnGpus::row_blocks(const Blocks& candidate) const {
  return candidate.overlaps_rows() ? candidate.sending_blocks : sending_blocks();
}

void MoeOnGpus::launch_rows(PassArgs& args, cudaStream_t stream) {
  if (args.call.backward) {
    return launch_send_rows(args.call, args.rows.data(), sending_blocks(), stream);
  }
  const Blocks& candidate = blocks_[args.candidate];
  if (candidate.dispatch.is_none()) {
    return launch_send_rows(args.call, args.rows.data(), row_blocks(candidate), stream);
  }
  launch_send_messages(args.call, messages_.data(), row_blocks(candidate), stream);
}

void MoeOnGpus::launch_permutation(const PassArgs& args, cudaStream_t stream) {
  MoePermutation permuted = permutation();
  if (args.call.backward) {
    permuted.ready = args.backward->blocks.overlaps_sort() ? uints(ready_) : nullptr;
    gradients_->add_tables(permuted, args.backward->d_act_table);
    return launch_permute(permuted, stream);
  }
  const Blocks& candidate = blocks_[args.candidate];
  const Tables& tables = tables_[args.candidate];
  permuted.ready = candidate.overlaps_sort() ? uints(ready_) : nullptr;
  if (joins(candidate, tables)) {
    permuted.senders = {&state()->senders, &state()->permuted, unsigned(row_blocks(candidate)),
                        args.call.deadline};
  }
  permuted.tables[permuted.table_count++] = in_of(candidate).table(tables.in);
  for (const int table : tables.out) permuted.tables[permuted.table_count++] = out_->table(table);
  launch_permute(permuted, stream);
}

// Results, whose memory holds sorted rows that are not saved, come later.
void* MoeOnGpus::sorted_x(const PassArgs& args) const {
  return args.activations ? args.activations->saved.x.data() : results_.data();
}

void MoeOnGpus::launch_gathering(const PassArgs& args, bool sends, cudaStream_t stream) {
  if (args.call.backward) {
    const MoeGather gather = gathering(uncompressed_rows(args.rows), gradients_->dout());
    const BackwardForm& form = *args.backward;
    if (!form.blocks.overlaps_sort()) return launch_gather(sorted(), gather, stream);
    const ConcurrentBlocks sorting{form.blocks.sorting_blocks, experts_.paired};
    return launch_overlapped_gather(gradients_->d_act_table(form.d_act_table), gather,
                                    uints(ready_), sorting, stream);
  }
  const Blocks& candidate = blocks_[args.candidate];
  const MoeGather gather = gathering(rows_of(candidate, args.rows), sorted_x(args));
  if (!candidate.overlaps_sort()) return launch_gather(sorted(), gather, stream);
  const GroupedTable& order = in_sorted_->table(tables_[args.candidate].in);
  const ConcurrentBlocks blocks{candidate.blocks_while_sorting(), experts_.paired};
  if (!sends) return launch_overlapped_gather(order, gather, uints(ready_), blocks, stream);
  launch_send_and_gather(args.call, args.rows.data(), candidate.sending_blocks, order, gather,
                         uints(ready_), blocks, stream);
}

void MoeOnGpus::launch_first(const PassArgs& args, cudaStream_t stream) {
  const Blocks& candidate = blocks_[args.candidate];
  GroupedArgs in = first_product(rows_of(candidate, args.rows), args.w_in);
  if (args.activations) in.out = args.activations->saved.gate_up.data();
  if (candidate.sorts) in.x = sorted_x(args);
  if (candidate.overlaps_sort()) in.ready = uints(ready_);
  in_of(candidate).launch(in, stream, tables_[args.candidate].in);
}

// Remote rows' tiles and local rows' have tables of their own.
void MoeOnGpus::launch_second(const PassStep& step, const PassArgs& args, cudaStream_t stream) {
  const Tables& tables = tables_[args.candidate];
  GroupedArgs product = second_product(args.w_out);
  product.concurrent = step.rows == RowsFrom::local;
  const size_t table = step.rows == RowsFrom::local ? 1 : size_t(step.chunk);
  out_->launch(product, stream, tables.out[table]);
}

void MoeOnGpus::launch_sums(const PassStep& step, const PassArgs& args, cudaStream_t stream) {
  if (args.call.backward || step.step == MoeStep::stage_sums) {
    return launch_send_sums(args.call, {0, coords_.shape.hidden}, 0, sending_blocks(), stream);
  }
  const Blocks& candidate = blocks_[args.candidate];
  ConcurrentBlocks blocks{candidate.sending_blocks, experts_.paired};
  if (candidate.overlaps_sort() && !candidate.is_serial()) {
    blocks.count = candidate.summing_blocks;
  } else if (candidate.is_serial()) {
    blocks = {sending_blocks(), false};
  }
  const Range columns = tables_[args.candidate].columns[size_t(step.chunk)];
  if (candidate.combine.is_none()) {
    return launch_send_sums(args.call, columns, step.chunk, blocks, stream);
  }
  launch_send_encoded_sums(args.call, candidate.combine, columns, step.chunk, blocks, stream);
}

void MoeOnGpus::launch_sum(const PassArgs& args, cudaStream_t stream) {
  if (args.call.backward) return launch_sum_ranks(args.call, args.result, 1, stream);
  const Blocks& candidate = blocks_[args.candidate];
  const int column_groups = int(tables_[args.candidate].columns.size());
  if (candidate.combine.is_none()) {
    return launch_sum_ranks(args.call, args.result, column_groups, stream);
  }
  launch_sum_encoded_ranks(args.call, candidate.combine, args.result, column_groups, stream);
}

void MoeOnGpus::push_rows(const PassArgs& args, cudaStream_t stream) {
  const PeerTable& table = buffer_->table();
  const size_t bytes = size_t(args.call.rows) * space_.row_bytes();
  for (int step = 1; step < comm_.size(); ++step) {
    const int to = moe_target(comm_.rank(), comm_.size(), step);
    push(args.rows.data(), table.memory[to] + space_.rows_at(to, comm_.rank()), bytes,
         &state()->agreed, table.signals[to] + MoeSpace::rows_signal(comm_.rank()), stream);
  }
}

// The gradients of routing weights have been stored by the kernel that added the sums.
void MoeOnGpus::push_sums(cudaStream_t stream) {
  const PeerTable& table = buffer_->table();
  const size_t bytes = space_.source_bytes();
  for (int step = 1; step < comm_.size(); ++step) {
    const int to = moe_target(comm_.rank(), comm_.size(), step);
    push(staged_sums_.data() + size_t(step - 1) * bytes,
         table.memory[to] + space_.sums_at(to, comm_.rank()), bytes, &state()->added,
         table.signals[to] + MoeSpace::sums_signal(0, comm_.rank()), stream);
  }
}

void MoeOnGpus::launch_gradient(const PassStep& step, const PassArgs& args, cudaStream_t stream) {
  const MoeSaved& saved = args.activations->saved;
  const bool stores = args.gradients == WeightGradients::store;
  if (step.step == MoeStep::d_act) {
    gradients_->multiply_d_act(args.w_out.data(), args.backward->d_act_table,
                               args.backward->blocks.overlaps_sort() ? uints(ready_) : nullptr,
                               stream);
  }
  if (step.step == MoeStep::gate) {
    gradients_->gate(sorted(), saved, ints(routing_idx_),
                     reinterpret_cast<const float*>(buffer_->local() + space_.weights_at(0)),
                     floats(d_gate_weight_), stream);
  }
  if (step.step == MoeStep::dx) gradients_->multiply_dx(args.w_in.data(), stream);
  if (step.step == MoeStep::dw_in) {
    gradients_->write_dw_in(sorted(), saved, args.dw_in, stores, stream);
  }
  if (step.step == MoeStep::dw_out) {
    gradients_->write_dw_out(sorted(), args.dw_out, stores, stream);
  }
}

}  // namespace tandem::gpu
