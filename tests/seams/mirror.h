// A toy codec that shows the requirements of a new one: reverses every byte's bits. A real one
// would be src/codec/mirror.cc. Four files: mirror.h, mirror.cc, CMakeLists.txt, seams_test.cc.
#pragma once

#include "codec/whole_codec.h"

namespace tandem::test {

codec::WholeCodec mirror();

}  // namespace tandem::test
