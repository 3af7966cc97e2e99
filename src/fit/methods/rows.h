// Rows of the methods' table, each defined in its method's file, and what several methods share.
#pragma once

#include "fit/methods/method.h"

namespace tandem::fit {

extern const OptionRow kPOption, kStepOption, kSparsityOption, kCohortOption, kGraphOption,
    kCodecOption, kTokensOption, kTauOption, kAsyncOption, kFailOption;

const MethodRow& gd_row();
const MethodRow& scaffnew_row();
const MethodRow& compressed_scaffnew_row();
const MethodRow& tamuna_row();
const MethodRow& proxcsl_row();
const MethodRow& average_row();
const MethodRow& gossip_row();
const MethodRow& api_bcd_row();

std::vector<int> all_clients(const Channel& channel);

/// Sends `x` of the server to all clients, and on the server sets `mean` to the mean of their
/// gradients at x.
void collect_gradients(const Setup& setup, std::span<const double> x, std::span<double> mean);

/// Sends the answer of each client to its rows alone up, and on the server sets `mean` to their
/// mean.
void average_local_answers(const Setup& setup, std::span<double> mean);

}  // namespace tandem::fit
