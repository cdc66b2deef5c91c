// The gather kernel: one launch copies many pieces (contiguous byte ranges) in device and mapped host memory.
//
// The addresses and sizes of the pieces are kernel parameters, so they need no upload, and a captured launch can be
// replayed. They have one of two forms:
//   Rows    pieces of equal size; 32-bit offsets from two bases, in units of 1 << shift bytes
//   Pieces  any sizes and addresses
// A piece is divided into `parts`; work item w is part w % parts of piece w / parts.

struct Piece {
    unsigned long long src, dst, nbytes;
};
template <int N> struct Rows {
    unsigned long long src_base, dst_base, nbytes;
    unsigned count, parts, shift, unused;
    unsigned src[N], dst[N];
};
template <int N> struct Pieces {
    unsigned count, parts;
    Piece piece[N];
};

template <typename T>
__device__ __forceinline__ void copy_as(const char *src, char *dst, unsigned long long nbytes, unsigned part, unsigned parts) {
    const T *from = reinterpret_cast<const T *>(src);
    T *to = reinterpret_cast<T *>(dst);
    const unsigned long long count = nbytes / sizeof(T), stride = (unsigned long long)parts * blockDim.x;
    unsigned long long i = (unsigned long long)part * blockDim.x + threadIdx.x;
    for (; i + 3 * stride < count; i += 4 * stride) {  // four loads in flight per thread
        T a = from[i], b = from[i + stride], c = from[i + 2 * stride], d = from[i + 3 * stride];
        to[i] = a, to[i + stride] = b, to[i + 2 * stride] = c, to[i + 3 * stride] = d;
    }
    for (; i < count; i += stride) to[i] = from[i];
}

__device__ __forceinline__ void copy_piece(unsigned long long src, unsigned long long dst, unsigned long long nbytes, unsigned part,
                                           unsigned parts) {
    const char *from = reinterpret_cast<const char *>(src);
    char *to = reinterpret_cast<char *>(dst);
    const unsigned long long any = src | dst | nbytes;
    if ((any & 15) == 0) copy_as<uint4>(from, to, nbytes, part, parts);
    else if ((any & 3) == 0) copy_as<unsigned>(from, to, nbytes, part, parts);
    else copy_as<unsigned char>(from, to, nbytes, part, parts);
}

template <int N> __device__ __forceinline__ void copy_rows(const Rows<N> &rows) {
    const unsigned items = rows.count * rows.parts;
    for (unsigned w = blockIdx.x; w < items; w += gridDim.x) {
        const unsigned k = w / rows.parts;
        copy_piece(rows.src_base + ((unsigned long long)rows.src[k] << rows.shift),
                   rows.dst_base + ((unsigned long long)rows.dst[k] << rows.shift), rows.nbytes, w - k * rows.parts, rows.parts);
    }
}

template <int N> __device__ __forceinline__ void copy_pieces(const Pieces<N> &pieces) {
    const unsigned items = pieces.count * pieces.parts;
    for (unsigned w = blockIdx.x; w < items; w += gridDim.x) {
        const unsigned k = w / pieces.parts;
        copy_piece(pieces.piece[k].src, pieces.piece[k].dst, pieces.piece[k].nbytes, w - k * pieces.parts, pieces.parts);
    }
}

// gather.py defines ROWS_SMALL to PIECES_LARGE, the numbers of pieces that fit into 4 KiB of parameters (small) or
// 32,764 bytes (large, if the driver supports that size).
extern "C" __global__ void rows_small(const __grid_constant__ Rows<ROWS_SMALL> rows) { copy_rows(rows); }
extern "C" __global__ void pieces_small(const __grid_constant__ Pieces<PIECES_SMALL> pieces) { copy_pieces(pieces); }
#ifdef ROWS_LARGE
extern "C" __global__ void rows_large(const __grid_constant__ Rows<ROWS_LARGE> rows) { copy_rows(rows); }
extern "C" __global__ void pieces_large(const __grid_constant__ Pieces<PIECES_LARGE> pieces) { copy_pieces(pieces); }
#endif
