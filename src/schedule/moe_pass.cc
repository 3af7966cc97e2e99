#include "schedule/moe_pass.h"

namespace tandem::schedule {
namespace {

MoePass join(MoePass first, const MoePass& second) {
  first.insert(first.end(), second.begin(), second.end());
  return first;
}

/// Sends rows in `lane`, which waits for the step before if that is in another lane.
void add_send(const MoePassForm& form, Lane lane, MoePass& pass) {
  const bool is_side = lane == Lane::side;
  if (is_side) pass.back().after = kNotified;
  pass.push_back(
      {.step = MoeStep::send_rows, .lane = lane, .before = is_side ? kNotified : kNoEvent});
  if (form.encodes_rows) pass.push_back({.step = MoeStep::decode_rows, .lane = lane});
  if (is_side && form.saves_gathered) pass.back().after = kRowsSent;
}

void add_row_pushes(MoePass& pass) {
  pass.back().after = kNotified;
  pass.push_back({.step = MoeStep::push_rows, .lane = Lane::side, .before = kNotified});
}

void add_staged_sums(MoePass& pass) {
  pass.push_back({.step = MoeStep::stage_sums, .after = computed_event(0)});
  pass.push_back({.step = MoeStep::push_sums,
                  .lane = Lane::side,
                  .before = computed_event(0),
                  .after = kSumsSent});
}

/// Gathers and multiplies rows of other ranks chunk by chunk.
void add_chunks(const MoePassForm& form, MoeStep product, MoePass& pass) {
  for (int chunk = 0; chunk < form.row_chunks; ++chunk) {
    pass.push_back({.step = MoeStep::gather, .rows = RowsFrom::remote, .chunk = chunk});
    pass.push_back({.step = product, .rows = RowsFrom::remote, .chunk = chunk});
  }
}

/// GEMMs of remote rows by column groups, each sent once it is computed.
void add_remote_groups(const MoePassForm& form, MoeStep product, MoePass& pass) {
  for (int group = 0; group < form.column_groups; ++group) {
    pass.push_back({.step = product, .rows = RowsFrom::remote, .chunk = group});
    pass.push_back({.step = MoeStep::send_sums, .chunk = group});
  }
}

}  // namespace

MoePass make_dispatch(const MoePassForm& form) {
  MoePass pass{{.step = MoeStep::notify}};
  if (form.encodes_rows) pass.push_back({.step = MoeStep::encode_rows});
  const bool overlaps = form.rows == RowExchange::overlapped;
  if (form.sends && form.rows == RowExchange::pushed) {
    add_row_pushes(pass);
  } else if (form.sends && form.rows != RowExchange::while_sorting) {
    add_send(form, overlaps ? Lane::side : Lane::main, pass);
  }
  pass.push_back({.step = MoeStep::permute});
  if (overlaps && form.row_chunks > 0) {
    pass.push_back({.step = MoeStep::gather, .rows = RowsFrom::local});
    pass.push_back({.step = MoeStep::first, .rows = RowsFrom::local});
    add_chunks(form, MoeStep::first, pass);
    return pass;
  }
  if (form.rows == RowExchange::while_sorting) {
    pass.push_back({.step = MoeStep::send_and_gather});
  } else if (!form.gathers_in_gemm) {
    pass.push_back({.step = MoeStep::gather});
  }
  pass.push_back({.step = MoeStep::first});
  if (form.gathers_in_gemm && form.saves_gathered) {
    // A gather that waits takes all SMs: kernels on the side that have yet to start, as this GEMM
    // had few tiles, would never start.
    pass.push_back({.step = MoeStep::gather, .before = overlaps ? kRowsSent : kNoEvent});
  }
  if (form.has_gate_step) pass.push_back({.step = MoeStep::swiglu});
  return pass;
}

MoePass make_combine(const MoePassForm& form) {
  MoePass pass;
  switch (form.sums) {
    case SumExchange::serial:
    case SumExchange::under_weights:
      pass.push_back({.step = MoeStep::second});
      if (form.sends) pass.push_back({.step = MoeStep::send_sums});
      break;
    case SumExchange::by_columns:
      for (int group = 0; group < form.column_groups; ++group) {
        pass.push_back({.step = MoeStep::second, .after = computed_event(group), .chunk = group});
        pass.push_back({.step = MoeStep::send_sums,
                        .lane = Lane::side,
                        .before = computed_event(group),
                        .after = group + 1 == form.column_groups ? kSumsSent : kNoEvent,
                        .chunk = group});
      }
      break;
    case SumExchange::local_last:
      add_remote_groups(form, MoeStep::second, pass);
      pass.push_back({.step = MoeStep::second, .rows = RowsFrom::local});
      break;
    case SumExchange::pushed:
      pass.push_back({.step = MoeStep::second, .rows = RowsFrom::remote});
      add_staged_sums(pass);
      pass.push_back({.step = MoeStep::second, .rows = RowsFrom::local});
      break;
  }
  const bool is_side = form.sums == SumExchange::by_columns || form.sums == SumExchange::pushed;
  pass.push_back({.step = MoeStep::sum_ranks, .before = is_side ? kSumsSent : kNoEvent});
  return pass;
}

MoePass make_forward(const MoePassForm& form) {
  return join(make_dispatch(form), make_combine(form));
}

MoePass make_dispatch_backward(const MoePassForm& form) {
  MoePass pass{{.step = MoeStep::notify}};
  if (form.sends && form.rows == RowExchange::pushed) {
    add_row_pushes(pass);
  } else if (form.sends) {
    pass.push_back({.step = MoeStep::send_rows});
  }
  if (form.rows == RowExchange::overlapped) {
    // The positions are those of the forward pass: local rows need not wait for `permute`.
    pass.push_back({.step = MoeStep::gather, .rows = RowsFrom::local});
    pass.push_back({.step = MoeStep::d_act, .rows = RowsFrom::local});
    pass.push_back({.step = MoeStep::permute});
    if (form.local_dx_first) pass.push_back({.step = MoeStep::dx, .rows = RowsFrom::local});
    add_chunks(form, MoeStep::d_act, pass);
    return pass;
  }
  pass.push_back({.step = MoeStep::permute});
  pass.push_back({.step = MoeStep::gather});
  pass.push_back({.step = MoeStep::d_act});
  if (form.has_gate_step) pass.push_back({.step = MoeStep::gate});
  return pass;
}

MoePass make_combine_backward(const MoePassForm& form) {
  MoePass pass;
  if (form.sums == SumExchange::serial || form.sums == SumExchange::under_weights) {
    pass.push_back({.step = MoeStep::dx});
    if (form.sends) pass.push_back({.step = MoeStep::send_sums});
  } else if (form.sums == SumExchange::pushed) {
    pass.push_back({.step = MoeStep::dx});
    add_staged_sums(pass);
  } else {
    add_remote_groups(form, MoeStep::dx, pass);
  }
  if (form.sums == SumExchange::serial) pass.push_back({.step = MoeStep::sum_ranks});
  pass.push_back({.step = MoeStep::dw_in});
  pass.push_back({.step = MoeStep::dw_out});
  if (form.sums == SumExchange::serial) return pass;
  if (form.sums == SumExchange::local_last && !form.local_dx_first) {
    pass.push_back({.step = MoeStep::dx, .rows = RowsFrom::local});
  }
  const bool is_pushed = form.sums == SumExchange::pushed;
  pass.push_back({.step = MoeStep::sum_ranks, .before = is_pushed ? kSumsSent : kNoEvent});
  return pass;
}

MoePass make_backward(const MoePassForm& form) {
  return join(make_dispatch_backward(form), make_combine_backward(form));
}

}  // namespace tandem::schedule
