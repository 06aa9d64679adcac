// What the matrix unit can do at best, see ceiling.inl.

#include "tiles.h"

namespace millstream::MS_LEVEL {

// As many products as multiply_of<bf16>: a tile's are 256 dots of 16 words. `w.scratch` holds zeros.
void multiply_tiles(int count, Worker& w) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) shapes.set(i, kUnitRows, 64);
    shapes.use();
    load_tile<4>(w.scratch, 0);
    load_tile<5>(w.scratch, 0);
    for (int n = 0; n < count / 32; n++) {
        dot_tiles<0, 4, 5>();
        dot_tiles<1, 4, 5>();
        dot_tiles<2, 4, 5>();
        dot_tiles<3, 4, 5>();
    }
    release_tiles();
}

}  // namespace millstream::MS_LEVEL
