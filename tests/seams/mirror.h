// A toy codec, to show what a new one takes: every byte's bits turned over. It stands here as it
// would in src/codec/mirror.cc.
#pragma once

#include "codec/whole_codec.h"

namespace tandem::test {

codec::WholeCodec mirror();

}  // namespace tandem::test
